#!/usr/bin/env bash
# profile_e2e_test.sh PROGRAM SOURCE: `train --profile` on MPI ranks: the same numbers, the tables, the files.
set -euo pipefail
program=$1 source=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
run() {  # NAME OPTIONS...
  local name=$1
  shift
  "$source/tools/mpirun" 2 "$program" train "$source/configs/quickstart.yaml" --set output="$folder/$name" \
    --set model.layers=2 --set model.hidden=64 --set model.heads=2 --set train.steps=5 "$@" >"$folder/$name.log" 2>&1
}
run plain
run profiled --profile
for line in "  limits  " "profile: 3 steps after 2 that warm up; means over 2 ranks" "recompute" "adamw" "gradient norm" \
  "reduce_scatter of block (backward)"; do
  grep -qF -- "$line" "$folder/profiled.log" || { echo "not said: $line"; cat "$folder/profiled.log"; exit 1; }
done
grep -q profile "$folder/plain.log" && { echo "a run without --profile speaks of it"; exit 1; }

python3 - "$folder" <<'PY'
import json, sys
folder = sys.argv[1]
load = lambda name: json.load(open(f"{folder}/{name}"))
plain, profiled = load("plain/summary.json"), load("profiled/summary.json")
for key in "loss", "grad_norm", "collectives":
    assert plain[key] == profiled[key], key
profile = load("profiled/profile.json")
assert profile["world"] == 2 and profile["steps"] == 3 and len(profile["ranks"]) == 2
for rank in profile["ranks"]:
    rows = rank["operations"]
    assert abs(sum(row["seconds"] for row in rows) - rank["seconds"]) < 1e-9
    assert {"forward", "recompute", "backward", "update", "copies", "communication", "waiting"} <= {row["part"] for row in rows}
    assert all(0 < row["of_limit"] < 20 for row in rows if row["limit_seconds"] > 0), rows
    assert rank["limits"]["flops_per_second"] > 0 and rank["limits"]["bytes_per_second"] > 0
trace = load("profiled/trace.json")["traceEvents"]
assert {event["pid"] for event in trace} == {0, 1}
steps = sorted((e["pid"], e["name"]) for e in trace if e["ph"] == "X" and e["name"].startswith("step "))
assert steps == [(rank, f"step {step}") for rank in (0, 1) for step in (3, 4, 5)], steps
PY

# An earlier run's files are replaced with the run, and a run that has nothing to record is refused.
run profiled --overwrite
[[ ! -e $folder/profiled/trace.json && ! -e $folder/profiled/profile.json ]] || { echo "the earlier profile is still there"; exit 1; }
code=0
run short --profile --set train.stop_after=2 || code=$?
[[ $code == 2 ]] || { echo "exit code $code"; cat "$folder/short.log"; exit 1; }
grep -q "train.stop_after: value 2 leaves --profile nothing to record" "$folder/short.log" || { cat "$folder/short.log"; exit 1; }
[[ ! -e $folder/short ]] || { echo "a refused run made its folder"; exit 1; }

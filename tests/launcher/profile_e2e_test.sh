#!/usr/bin/env bash
# profile_e2e_test.sh PROGRAM SOURCE: `train --profile` on MPI ranks: the same numbers, the tables, the files.
source "$2/tests/launcher/e2e_functions.sh"
train() {  # CODE NAME OPTIONS...
  run "$1" "$mpirun" 2 "$program" train "$quickstart" --set output="$2" --set model.layers=2 --set model.hidden=64 \
    --set model.heads=2 --set train.steps=5 "${@:3}"
}
train 0 plain
lines out profile 0
train 0 profiled --profile
for line in "  limits  " "profile: 3 steps after 2 that warm up; means over 2 ranks" "recompute" "adamw" "gradient norm" \
  "reduce_scatter of block (backward)"; do
  says out "$line"
done

python3 - <<'PY' || fail "the files of the profile"
import json
load = lambda name: json.load(open(name))
plain, profiled = load("plain/summary.json"), load("profiled/summary.json")
for key in "loss", "grad_norm", "collectives":
    assert plain[key] == profiled[key], key
profile = load("profiled/profile.json")
assert profile["world"] == 2 and profile["steps"] == 3 and len(profile["ranks"]) == 2
for rank in profile["ranks"]:
    rows = rank["operations"]
    assert abs(sum(row["seconds"] for row in rows) - rank["seconds"]) < 1e-9
    assert {"forward", "recompute", "backward", "update", "copies", "communication", "waiting"} <= {row["part"] for row in rows}
    assert all(row["of_limit"] > 0 for row in rows if row["limit_seconds"] > 0), rows
    assert rank["limits"]["flops_per_second"] > 0 and rank["limits"]["bytes_per_second"] > 0
trace = load("profiled/trace.json")["traceEvents"]
assert {event["pid"] for event in trace} == {0, 1}
steps = sorted((e["pid"], e["name"]) for e in trace if e["ph"] == "X" and e["name"].startswith("step "))
assert steps == [(rank, f"step {step}") for rank in (0, 1) for step in (3, 4, 5)], steps
PY

# An earlier run's files are replaced with the run, and a run that has nothing to record is refused.
train 0 profiled --overwrite
[[ ! -e profiled/trace.json && ! -e profiled/profile.json ]] || fail "the earlier profile is still there"
train 2 short --profile --set train.stop_after=2
says err "train.stop_after: value 2 leaves --profile nothing to record"
[[ ! -e short ]] || fail "a refused run made its folder"

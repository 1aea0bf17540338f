#!/usr/bin/env bash
# runs_e2e_test.sh PROGRAM SOURCE: what a person may try with a configuration: other numbers of ranks, a long sequence, stopping
# early by key and by signal, a folder that exists, ranks that were started differently.
set -euo pipefail
program=$1 source=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
run() {  # RANKS NAME SETTINGS...
  local ranks=$1 name=$2
  shift 2
  local sets=()
  for setting in "$@"; do sets+=(--set "$setting"); done
  "$source/tools/mpirun" "$ranks" "$program" train "$source/configs/quickstart.yaml" --set output="$folder/$name" \
    --set model.layers=2 --set model.hidden=64 --set model.heads=2 "${sets[@]}" >"$folder/$name.log" 2>&1
}
value() { python3 -c 'import json, sys; print(eval(sys.argv[2], {"s": json.load(open(sys.argv[1]))}))' "$folder/$1/summary.json" "$2"; }
expect() { [[ $2 == "$3" ]] || { echo "$1: $2, not $3"; cat "$folder"/*.log; exit 1; }; }

for ranks in 1 2 3 4; do
  run "$ranks" "ranks$ranks" train.steps=2
  expect "world at $ranks ranks" "$(value "ranks$ranks" "s['world'], s['steps'], s['collectives']['expected_matches']")" "($ranks, 2, True)"
done

# The same sequences a step on any number of ranks: the same first loss, by the bits of its sum but for rounding.
run 1 one train.steps=1 train.micro_batch=12
for ranks in 2 3 4; do
  run "$ranks" "same$ranks" train.steps=1 train.micro_batch=$((12 / ranks))
  python3 - "$folder/one/summary.json" "$folder/same$ranks/summary.json" <<'PY'
import json, sys
one, many = (json.load(open(path))["loss"][0] for path in sys.argv[1:])
assert abs(one - many) <= 2e-6 * one, (one, many)
PY
done

run 2 long model.max_sequence=4096 data.sequence=4096 train.micro_batch=1 train.steps=2
expect "long sequence" "$(value long "s['steps'], s['collectives']['expected_matches'], s['loss'][1] < s['loss'][0] + 0.1")" "(2, True, True)"

run 2 early train.steps=50 train.stop_after=3
expect "stop_after" "$(value early "s['steps']")" 3
grep -q "^stopped after step 3 of 50 (train.stop_after), loss " "$folder/early.log" || { cat "$folder/early.log"; exit 1; }

sets=(--set train.steps=100000 --set model.layers=2 --set model.hidden=64 --set model.heads=2 --set output="$folder/signal")
"$source/tools/mpirun" 2 "$program" train "$source/configs/quickstart.yaml" "${sets[@]}" >"$folder/signal.log" 2>&1 &
pid=$!
for _ in $(seq 200); do grep -q "step 2" "$folder/signal.log" 2>/dev/null && break || sleep 0.1; done
kill -USR1 $pid
wait $pid || { echo "a run that was asked to stop by SIGUSR1 failed"; cat "$folder/signal.log"; exit 1; }
expect "stopped by a signal" "$(value signal "2 <= s['steps'] < 100000 and s['collectives']['expected_matches']")" True
grep -q "^stopped after step [0-9]* of 100000 (a signal), loss " "$folder/signal.log" || { cat "$folder/signal.log"; exit 1; }

# Ctrl-C, with and without mpirun: the step ends and there is a summary. (Jobs of a script ignore SIGINT, mpirun too.)
for ranks in 0 2; do
  launch=()
  ((ranks == 0)) || launch=("$source/tools/mpirun" "$ranks")
  python3 -c 'import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])' "${launch[@]}" "$program" train "$source/configs/quickstart.yaml" "${sets[@]}" --overwrite \
    >"$folder/interrupt.log" 2>&1 &
  pid=$!
  for _ in $(seq 200); do grep -q "step 2" "$folder/interrupt.log" 2>/dev/null && break || sleep 0.1; done
  kill -INT $pid
  wait $pid || ((ranks > 0)) || { echo "an interrupted run failed"; cat "$folder/interrupt.log"; exit 1; }
  expect "interrupted" "$(value signal "2 <= s['steps'] < 100000")" True
  grep -q "^stopped after step [0-9]* of 100000 (a signal), loss " "$folder/interrupt.log" || { cat "$folder/interrupt.log"; exit 1; }
  expect "lines that say so" "$(grep -c "regather: stopping after this step" "$folder/interrupt.log")" 1
done

# A comparison that is asked to stop reports the rounds that it has completed.
sets=(--rounds 1000 --steps 1 --policies none,full --set model.layers=2 --set model.hidden=64 --set model.heads=2
      --set output="$folder/compared")
"$source/tools/mpirun" 2 "$program" compare "$source/configs/quickstart.yaml" "${sets[@]}" >"$folder/compared.log" 2>&1 &
pid=$!
for _ in $(seq 200); do grep -q "round 2/1000" "$folder/compared.log" 2>/dev/null && break || sleep 0.1; done
kill -USR1 $pid
wait $pid || { echo "a comparison that was asked to stop by SIGUSR1 failed"; cat "$folder/compared.log"; exit 1; }
grep -q "stopped by a signal in round" "$folder/compared.log" || { cat "$folder/compared.log"; exit 1; }
[[ -s $folder/compared/compare.md ]] || { cat "$folder/compared.log"; exit 1; }

code=0
run 2 early train.steps=1 || code=$?
expect "a folder that holds a run" $code 2
grep -q -- "--overwrite" "$folder/early.log" || { cat "$folder/early.log"; exit 1; }

code=0
"$source/tools/mpirun" 2 bash -c "\"$program\" train \"$source/configs/quickstart.yaml\" --set output=\"$folder/mixed\" --set train.seed=\$((5 + OMPI_COMM_WORLD_RANK))" \
  >"$folder/mixed.log" 2>&1 || code=$?
expect "ranks with different configurations" $code 2
grep -q "train.seed: 5 on rank 0, 6 on rank 1" "$folder/mixed.log" || { cat "$folder/mixed.log"; exit 1; }

# A rank that is killed in the middle of training ends the run at once; the other says where each was.
sets=(--set train.steps=100000 --set model.layers=2 --set model.hidden=64 --set model.heads=2 --set output="$folder/killed")
"$source/tools/mpirun" 2 --enable-recovery "$program" train "$source/configs/quickstart.yaml" "${sets[@]}" >"$folder/killed.log" 2>&1 &
pid=$!
for _ in $(seq 200); do grep -q "step 2" "$folder/killed.log" 2>/dev/null && break || sleep 0.1; done
for victim in $(pgrep -f "$folder/killed"); do
  tr '\0' '\n' <"/proc/$victim/environ" 2>/dev/null | grep -qx OMPI_COMM_WORLD_RANK=1 && kill -KILL "$victim"
done
begin=$SECONDS
wait $pid || true
((SECONDS - begin < 10)) || { echo "a killed rank was noticed after $((SECONDS - begin)) s"; exit 1; }
grep -q "regather: error: rank 0: step [0-9]*: .*rank 1 is gone" "$folder/killed.log" || { cat "$folder/killed.log"; exit 1; }

code=0
run 2 small memory.limit=2MiB train.steps=1 || code=$?
expect "over the memory limit" $code 3
grep -q "activations" "$folder/small.log" || { cat "$folder/small.log"; exit 1; }
echo "all runs ended as they should"

#!/usr/bin/env bash
# runs_e2e_test.sh PROGRAM SOURCE: what a person may try with a configuration: other numbers of ranks, a long sequence, stopping
# early by key and by signal, a folder that exists, ranks that were started differently.
source "$2/tests/launcher/e2e_functions.sh"
small=(--set model.layers=2 --set model.hidden=64 --set model.heads=2)
train() {  # CODE RANKS NAME SETTINGS...
  local sets=()
  for setting in "${@:4}"; do sets+=(--set "$setting"); done
  run "$1" "$mpirun" "$2" "$program" train "$quickstart" "${small[@]}" --set output="$3" "${sets[@]}"
}
value() { python3 -c 'import json, sys; print(eval(sys.argv[2], {"s": json.load(open(sys.argv[1]))}))' "$1/summary.json" "$2"; }
expect() { [[ $2 == "$3" ]] || fail "$1: $2, not $3"; }

# The same sequences a step on any number of ranks: the same first loss, by the bits of its sum but for rounding.
for ranks in 1 2 3 4; do
  train 0 "$ranks" "ranks$ranks" train.steps=2 train.micro_batch=$((12 / ranks))
  expect "world at $ranks ranks" "$(value "ranks$ranks" "s['world'], s['steps'], s['collectives']['expected_matches']")" "($ranks, 2, True)"
  python3 - ranks1/summary.json "ranks$ranks/summary.json" <<'PY' || fail "the loss of $ranks ranks"
import json, sys
one, many = (json.load(open(path))["loss"][0] for path in sys.argv[1:])
assert abs(one - many) <= 2e-6 * one, (one, many)
PY
done

train 0 2 long model.max_sequence=4096 data.sequence=4096 train.micro_batch=1 train.steps=2
expect "long sequence" "$(value long "s['steps'], s['collectives']['expected_matches'], s['loss'][1] < s['loss'][0] + 0.1")" "(2, True, True)"

train 0 2 early train.steps=50 train.stop_after=3
expect "stop_after" "$(value early "s['steps']")" 3
lines out "^stopped after step 3 of 50 (train.stop_after), loss " 1
train 2 2 early train.steps=1
says err --overwrite

# SIGUSR1, and Ctrl-C with and without mpirun: the step ends and there is a summary. (Jobs of a script ignore SIGINT, mpirun too.)
endless=(train "$quickstart" "${small[@]}" --set train.steps=100000 --overwrite)
stopped() {
  expect "stopped by a signal" "$(value endless "2 <= s['steps'] < 100000 and s['collectives']['expected_matches']")" True
  lines out "^stopped after step [0-9]* of 100000 (a signal), loss " 1
  lines err "regather: stopping after this step" 1
}
begin "$mpirun" 2 "$program" "${endless[@]}" --set output=endless
await out "^step 2/"
kill -USR1 $pid
end 0 "asked to stop by SIGUSR1"
stopped
for ranks in 0 2; do
  launch=()
  ((ranks == 0)) || launch=("$mpirun" "$ranks")
  begin python3 -c 'import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])' "${launch[@]}" "$program" "${endless[@]}" --set output=endless
  await out "^step 2/"
  kill -INT $pid
  if ((ranks == 0)); then end 0 "interrupted"; else wait $pid || true; fi  # mpirun has a code of its own for it
  stopped
done

# A comparison that is asked to stop reports the rounds that it has completed.
begin "$mpirun" 2 "$program" compare "$quickstart" "${small[@]}" --rounds 1000 --steps 1 --policies none,full --set output=compared
await out "round 2/1000"
kill -USR1 $pid
end 0 "a comparison that was asked to stop by SIGUSR1"
says out "stopped by a signal in round"
[[ -s compared/compare.md ]] || fail "there is no report"

run 2 "$mpirun" 2 bash -c "\"$program\" train \"$quickstart\" --set output=mixed --set train.seed=\$((5 + OMPI_COMM_WORLD_RANK))"
says err "train.seed: 5 on rank 0, 6 on rank 1"

# A rank that is killed in the middle of training ends the run at once (not by communication.timeout); the other says where each was.
begin "$mpirun" 2 --enable-recovery "$program" "${endless[@]}" --set output="$work/killed" --set communication.timeout=100s
await out "^step 2/"
for victim in $(pgrep -f "$work/killed"); do
  grep -qxz OMPI_COMM_WORLD_RANK=1 "/proc/$victim/environ" && kill -KILL "$victim"
done
begin=$SECONDS
wait $pid || true
((SECONDS - begin < 50)) || fail "a killed rank was noticed after $((SECONDS - begin)) s"
lines err "^regather: error: rank 0: step [0-9]*: .*rank 1 is gone" 1

train 3 2 little memory.limit=2MiB train.steps=1
says err activations

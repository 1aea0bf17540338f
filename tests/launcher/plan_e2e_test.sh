#!/usr/bin/env bash
# plan_e2e_test.sh PROGRAM SOURCE: a plan made alone for two ranks is what two ranks then measure; calibration is found again; policy
# budget keeps to its budget; what fit says fits trains, and one more is refused with exit code 3.
source "$2/tests/launcher/e2e_functions.sh"
export XDG_CACHE_HOME=$work/cache
sed -e 's/^  layers: 6/  layers: 4/' -e 's/^  hidden: 384/  hidden: 48/' -e 's/^  heads: 6/  heads: 2/' -e 's/^  steps: 50/  steps: 3/' \
  -e 's/^  micro_batch: 4/  micro_batch: 2/' -e "s|/usr/share/common-licenses/GPL-3|$source/tests/golden/text.txt|" \
  -e "s|^output: .*|output: run|" "$quickstart" >small.yaml
alone() { run "$1" "$program" "$2" small.yaml "${@:3}"; }  # CODE COMMAND ARGUMENTS...
two() { run "$1" "$mpirun" 2 "$program" "$2" small.yaml "${@:3}"; }
value() { python3 -c 'import json, sys; print(eval("json.load(open(sys.argv[1]))" + sys.argv[2]))' "$@"; }

alone 0 plan --world 2 --json full.json --picture full.svg
says out "its backward comes first"
python3 -c 'import sys, xml.etree.ElementTree as t; assert t.parse(sys.argv[1]).getroot().tag.endswith("svg")' full.svg
two 0 plan --calibrate --json calibrated.json
[[ $(value calibrated.json '["step_seconds"]["calibrated"]') == True ]] || fail "not calibrated"
alone 0 plan --world 2 --json full.json
[[ $(value full.json '["step_seconds"]["calibrated"]') == True ]] || fail "the calibration was not found again"

least=$(value full.json '["frontier"]["points"][0]["bytes"]')
budget=$(value full.json '["frontier"]["points"][6]["bytes"]')
alone 2 plan --world 2 --set activation_checkpointing.policy=budget --set activation_checkpointing.budget=$((least - 1))
says err "($least bytes) or more"
planned=(--set activation_checkpointing.policy=budget --set activation_checkpointing.budget="$budget")
alone 0 plan --world 2 "${planned[@]}" --json budget.json
two 0 train "${planned[@]}" --overwrite
python3 - "$budget" <<'PY' || fail "the run is not as planned"
import json, sys
plan, run = (json.load(open(f)) for f in ("budget.json", "run/summary.json"))
assert run["memory_bytes"]["peak"] == run["predicted"]["peak_bytes"] == plan["memory_bytes"]["peak"]
assert run["memory_bytes"]["peak_of"]["activations"] == plan["memory_bytes"]["peak_of"]["activations"] <= int(sys.argv[1])
assert run["predicted"]["bytes_on_wire"] == plan["collectives"]["bytes_on_wire"]
assert run["collectives"]["per_step"] == plan["collectives"]["per_step"]
assert run["predicted"]["step_seconds"] > 0
assert run["collectives"]["expected_matches"] is True
assert run["config"]["activation_checkpointing"]["policy"] == "budget"
PY

two 0 fit --memory 12MiB --policies full,budget --json fit.json
says out "is refused: "
for policy in full budget; do
  index=$([[ $policy == full ]] && echo 0 || echo 1)
  fits=$(value fit.json "['policies'][$index]['micro_batch']['largest']")
  [[ $(value fit.json "['policies'][$index]['micro_batch']['confirmed']") == True ]] || fail "$policy: not confirmed"
  at=(--overwrite --set memory.limit=12MiB --set activation_checkpointing.policy=$policy --set train.steps=2)
  [[ $policy == budget ]] && at+=(--set activation_checkpointing.budget=0 --set sharding.resident_slots=0)
  two 0 train "${at[@]}" --set train.micro_batch="$fits"
  [[ $policy == full ]] || continue
  two 3 train "${at[@]}" --set train.micro_batch=$((fits + 1))
  says err "at its peak ("
done
two 3 fit --memory 64KiB --policies full

#!/usr/bin/env bash
# plan_e2e_test.sh PROGRAM SOURCE: a plan made alone for two ranks is what two ranks then measure; calibration is found again; policy
# budget keeps to its budget; what fit says fits trains, and one more is refused with exit code 3.
set -euo pipefail
program=$1 source=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export XDG_CACHE_HOME=$folder/cache
sed -e 's/^  layers: 6/  layers: 4/' -e 's/^  hidden: 384/  hidden: 48/' -e 's/^  heads: 6/  heads: 2/' -e 's/^  steps: 50/  steps: 3/' \
  -e 's/^  micro_batch: 4/  micro_batch: 2/' -e "s|/usr/share/common-licenses/GPL-3|$source/tests/golden/text.txt|" \
  -e "s|^output: .*|output: $folder/run|" "$source/configs/quickstart.yaml" >"$folder/small.yaml"
alone() { "$program" "$1" "$folder/small.yaml" "${@:2}" >"$folder/log" 2>&1; }
two() { "$source/tools/mpirun" 2 "$program" "$1" "$folder/small.yaml" "${@:2}" >"$folder/log" 2>&1; }
source "$source/tests/launcher/e2e_functions.sh"
value() { python3 -c 'import json, sys; print(eval("json.load(open(sys.argv[1]))" + sys.argv[2]))' "$@"; }

alone plan --world 2 --json "$folder/full.json" --picture "$folder/full.svg" || fail "plan failed"
grep -q "its backward comes first" "$folder/log" || fail "the plan does not say why"
python3 -c 'import sys, xml.etree.ElementTree as t; assert t.parse(sys.argv[1]).getroot().tag.endswith("svg")' "$folder/full.svg"
two plan --calibrate --json "$folder/calibrated.json" || fail "calibration failed"
[[ $(value "$folder/calibrated.json" '["step_seconds"]["calibrated"]') == True ]] || fail "not calibrated"
alone plan --world 2 --json "$folder/full.json" || fail "plan failed"
[[ $(value "$folder/full.json" '["step_seconds"]["calibrated"]') == True ]] || fail "the calibration was not found again"

least=$(value "$folder/full.json" '["frontier"]["points"][0]["bytes"]')
budget=$(value "$folder/full.json" '["frontier"]["points"][6]["bytes"]')
expect_code 2 "a budget that is too small" alone plan --world 2 --set activation_checkpointing.policy=budget \
  --set activation_checkpointing.budget=$((least - 1))
grep -q "($least bytes) or more" "$folder/log" || fail "the message does not say what is enough"
planned=(--set activation_checkpointing.policy=budget --set activation_checkpointing.budget="$budget")
alone plan --world 2 "${planned[@]}" --json "$folder/budget.json" || fail "planning a budget failed"
two train "${planned[@]}" --overwrite || fail "training within a budget failed"
python3 - "$folder" "$budget" <<'PY'
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
plan, run = (json.loads((folder / f).read_text()) for f in ("budget.json", "run/summary.json"))
assert run["memory_bytes"]["peak"] == run["predicted"]["peak_bytes"] == plan["memory_bytes"]["peak"]
assert run["memory_bytes"]["peak_of"]["activations"] == plan["memory_bytes"]["peak_of"]["activations"] <= int(sys.argv[2])
assert run["predicted"]["bytes_on_wire"] <= plan["collectives"]["bytes_on_wire"] * 1.01
assert run["predicted"]["step_seconds"] > 0
assert run["collectives"]["expected_matches"] is True
assert run["config"]["activation_checkpointing"]["policy"] == "budget"
PY

two fit --memory 12MiB --policies full,budget --json "$folder/fit.json" || fail "fit failed"
grep -q "is refused: " "$folder/log" || fail "fit does not say what one more would need"
for policy in full budget; do
  index=$([[ $policy == full ]] && echo 0 || echo 1)
  fits=$(value "$folder/fit.json" "['policies'][$index]['micro_batch']['largest']")
  [[ $(value "$folder/fit.json" "['policies'][$index]['micro_batch']['confirmed']") == True ]] || fail "$policy: not confirmed"
  at=(--overwrite --set memory.limit=12MiB --set activation_checkpointing.policy=$policy --set train.steps=2)
  [[ $policy == budget ]] && at+=(--set activation_checkpointing.budget=0 --set sharding.resident_slots=0)
  expect_code 0 "$policy, micro_batch $fits" two train "${at[@]}" --set train.micro_batch="$fits"
  [[ $policy == full ]] || continue
  expect_code 3 "$policy, micro_batch $((fits + 1))" two train "${at[@]}" --set train.micro_batch=$((fits + 1))
  grep -q "at its peak (" "$folder/log" || fail "does not say who holds what"
done
expect_code 3 "nothing fits" two fit --memory 64KiB --policies full

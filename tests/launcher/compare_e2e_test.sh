#!/usr/bin/env bash
# compare_e2e_test.sh PROGRAM SOURCE: a comparison on two ranks writes a report, pictures and figures, next to the files of a run;
# one under a limit says what does not fit, and none that fits is told by the exit code.
set -euo pipefail
program=$1 source=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
small=(--set output="$folder/run" --set model.layers=3 --set model.hidden=48 --set model.heads=2 --set train.micro_batch=2
       --set train.steps=2 --set data.files="[$source/tests/golden/text.txt]")
regather() {
  local command=$1
  shift
  "$source/tools/mpirun" 2 "$program" "$command" "$source/configs/quickstart.yaml" "${small[@]}" "$@" >"$folder/log" 2>&1
}
source "$source/tests/launcher/e2e_functions.sh"

regather train || fail "train failed"
regather compare --steps 1 --rounds 2 --json "$folder/copy.json" || fail "compare failed"
for words in "activations, at most" "relative to none" "gradients identical" "report " compare_memory.svg; do
  grep -q -- "$words" "$folder/log" || fail "the output does not say: $words"
done
cmp "$folder/copy.json" "$folder/run/compare.json"
[[ -s $folder/run/summary.json ]] || fail "the run's own files are gone"
python3 - "$folder/run" <<'PY'
import json, pathlib, sys, xml.etree.ElementTree as tree
folder = pathlib.Path(sys.argv[1])
result = json.loads((folder / "compare.json").read_text())
assert result["holds"] is True and result["reference"] == "none" and result["world"] == 2
assert [p["policy"] for p in result["policies"]] == ["none", "full", "every_n_layers", "segments"]
for p in result["policies"]:
    assert p["ran"] and p["identical"] and p["loss_difference"] == 0 and p["gradient_difference"] == 0, p["policy"]
    assert p["collectives"]["expected_matches"] is True
    assert p["memory_bytes"] == p["planned_bytes"], p["policy"]
    assert len(p["step_seconds_of_rounds"]) == 2
none, full = result["policies"][:2]
assert none["memory_bytes"]["peak_of"]["activations"] > 1.5 * full["memory_bytes"]["peak_of"]["activations"]
report = (folder / "compare.md").read_text()
for name in ("compare_memory.svg", "compare_time.svg"):
    assert name in report
    assert tree.parse(folder / name).getroot().tag.endswith("svg")
limit = none["planned_bytes"]["peak"] - 1
(folder / "limit").write_text(str(limit))
PY

expect_code 2 "an earlier comparison in the folder" regather compare --steps 1 --rounds 1
grep -q -- --overwrite "$folder/log" || fail "the message does not name --overwrite"
expect_code 0 "a policy over the limit" regather compare --steps 1 --rounds 1 --policies none,full --overwrite \
  --set memory.limit="$(cat "$folder/run/limit")"
grep -q '`none`: does not fit' "$folder/log" || fail "the output does not say what does not fit"
expect_code 3 "no policy fits" regather compare --steps 1 --rounds 1 --policies none,full --overwrite --set memory.limit=1MiB
expect_code 2 "an unknown policy" regather compare --policies non --overwrite
grep -q 'did you mean none' "$folder/log" || fail "no suggestion"

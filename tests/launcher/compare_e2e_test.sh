#!/usr/bin/env bash
# compare_e2e_test.sh PROGRAM SOURCE: a comparison on two ranks writes a report, pictures and figures, next to the files of a run;
# one under a limit says what does not fit, and none that fits is told by the exit code.
source "$2/tests/launcher/e2e_functions.sh"
small=(--set output=run --set model.layers=3 --set model.hidden=48 --set model.heads=2 --set train.micro_batch=2
       --set train.steps=2 --set data.files="[$source/tests/golden/text.txt]")
regather() {  # CODE COMMAND ARGUMENTS...
  run "$1" "$mpirun" 2 "$program" "$2" "$quickstart" "${small[@]}" "${@:3}"
}

regather 0 train
regather 0 compare --steps 1 --rounds 2 --json copy.json
for words in "activations, at most" "relative to none" "gradients identical" "report " compare_memory.svg; do says out "$words"; done
cmp copy.json run/compare.json || fail "--json is not a copy of compare.json"
[[ -s run/summary.json ]] || fail "the run's own files are gone"
python3 - run <<'PY' || fail "what the comparison left behind"
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

# An earlier comparison in the folder; a policy over the limit, and none that fits; an unknown one.
regather 2 compare --steps 1 --rounds 1
says err --overwrite
regather 0 compare --steps 1 --rounds 1 --policies none,full --overwrite --set memory.limit="$(cat run/limit)"
says out '`none`: does not fit'
regather 3 compare --steps 1 --rounds 1 --policies none,full --overwrite --set memory.limit=1MiB
regather 2 compare --policies non --overwrite
says err "did you mean none"

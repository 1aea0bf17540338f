#!/usr/bin/env bash
# quickstart_e2e_test.sh PROGRAM SOURCE: the beginning of the quickstart's training on two ranks gives PyTorch's numbers, communicates as
# planned, needs the memory that was forecast, and stays near it in the system's eyes.
source "$2/tests/launcher/e2e_functions.sh"
run 0 "$mpirun" 2 "$program" train "$quickstart" --set data.files="[$source/tests/golden/text.txt]" --set train.stop_after=20 --set output=run
python3 - run/summary.json "$source/tests/golden/quickstart.json" <<'PY' || fail "the quickstart"
import json, sys
run, golden = (json.load(open(path)) for path in sys.argv[1:])
steps = len(run["loss"])
assert steps == 20 and len(golden["loss"]) == 50
for step, (ours, theirs) in enumerate(zip(run["loss"], golden["loss"]), 1):
    assert abs(ours - theirs) <= 2e-5 * theirs, f"step {step}: loss {ours}, PyTorch {theirs}"
assert run["collectives"]["expected_matches"] is True
memory = run["memory_bytes"]
assert memory["peak"] == run["predicted"]["peak_bytes"], (memory["peak"], run["predicted"])
assert sum(memory["at_peak"].values()) == memory["peak"]
grown = memory["peak_rss"] - memory["baseline_rss"]
assert grown <= 1.15 * memory["peak"] + (64 << 20), f"resident memory grew by {grown}, the allocator's peak is {memory['peak']}"
wire = sum(entry["bytes"] for entry in run["collectives"]["per_step"])
assert wire == run["predicted"]["bytes_on_wire"], (wire, run["predicted"])
worst = max(abs(ours - theirs) / theirs for ours, theirs in zip(run["loss"], golden["loss"]))
print("loss", run["loss"][0], "->", run["loss"][-1], "relative to PyTorch at most", worst, "peak", memory["peak"], "grown", grown)
PY

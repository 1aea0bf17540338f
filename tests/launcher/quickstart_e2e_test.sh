#!/usr/bin/env bash
# quickstart_e2e_test.sh PROGRAM SOURCE: the quickstart's training on two ranks gives PyTorch's numbers, communicates as planned,
# needs the memory that was forecast, and stays near it in the system's eyes.
set -euo pipefail
program=$1 source=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$source/tools/mpirun" 2 "$program" train "$source/configs/quickstart.yaml" --set data.files="[$source/tests/golden/text.txt]" --set output="$folder/run"
python3 - "$folder/run/summary.json" "$source/tests/golden/quickstart.json" <<'PY'
import json, sys
run, golden = (json.load(open(path)) for path in sys.argv[1:])
assert len(run["loss"]) == 50
for step, (ours, theirs) in enumerate(zip(run["loss"][:10], golden["loss"][:10]), 1):
    assert abs(ours - theirs) <= 2e-5 * theirs, f"step {step}: loss {ours}, PyTorch {theirs}"
ours, theirs = (sum(r["loss"][-5:]) / 5 for r in (run, golden))
assert abs(ours - theirs) <= 0.01 * theirs, f"mean of the last five losses {ours}, PyTorch {theirs}"
assert run["collectives"]["expected_matches"] is True
memory = run["memory_bytes"]
assert memory["peak"] == run["predicted"]["peak_bytes"], (memory["peak"], run["predicted"])
assert sum(memory["at_peak"].values()) == memory["peak"]
grown = memory["peak_rss"] - memory["baseline_rss"]
assert grown <= 1.15 * memory["peak"] + (64 << 20), f"resident memory grew by {grown}, the allocator's peak is {memory['peak']}"
wire = sum(entry["bytes"] for entry in run["collectives"]["per_step"])
assert wire == run["predicted"]["bytes_on_wire"], (wire, run["predicted"])
print("loss", run["loss"][0], "->", run["loss"][-1], "peak", memory["peak"], "grown", grown)
PY

#!/usr/bin/env python3
"""bench/plan_accuracy.py CONFIG [--ranks N] [--budgets N] [--rounds N] [--steps N] [--set a.b=v]...: predicted against measured.

For activation budgets from the smallest that is possible to what policy none needs, for half of that (alone, and "host": with
offload: auto), and for the policies none and full, a process of its own makes the plan (`regather plan`). Then the ranks train under each in turn, `rounds` times a few steps; a
variant's figure is the median of all its steps but each run's first. Its spread is half the distance between the quartiles, by
the median. "slower" is against none. Calibrate first:

    tools/mpirun 2 build/cpu/regather plan CONFIG --calibrate
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "build/cpu/regather"
MIB = 1 << 20


def run(command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")


def spread(seconds):
    low, _, high = statistics.quantiles(seconds, n=4)
    return (high - low) / 2 / statistics.median(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budgets", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a run")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", help="for all runs, as of regather")
    args = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp())
    sets = [word for setting in args.set for word in ("--set", setting)]

    def plan(more):
        run([PROGRAM, "plan", args.config, "--world", args.ranks, "--json", folder / "plan.json", *sets, *more])
        return json.loads((folder / "plan.json").read_text())

    def train(more):
        run([ROOT / "tools/mpirun", args.ranks, PROGRAM, "train", args.config, *sets, *more, "--set",
             f"train.steps={args.steps + 1}", "--set", f"output={folder / 'run'}", "--overwrite"])
        lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        summary = json.loads((folder / "run/summary.json").read_text())
        return [line["seconds"] for line in lines[1:]], summary["memory_bytes"]["peak"]

    def policy(name):
        return ["--set", f"activation_checkpointing.policy={name}"]

    points = plan([])["frontier"]["points"]
    least, most = points[0]["bytes"], points[-1]["bytes"]
    variants = {"none": policy("none"), "full": policy("full")}
    budgets = [least + (most - least) * i // (args.budgets - 1) for i in range(args.budgets)]
    for budget in sorted([*budgets, most // 2]):
        variants[f"{budget / MIB:.1f}"] = policy("budget") + ["--set", f"activation_checkpointing.budget={budget}"]
    half = f"{most // 2 / MIB:.1f}"
    variants[f"{half} host"] = variants[half] + ["--set", "activation_checkpointing.offload=auto"]
    plans = {name: plan(more) for name, more in variants.items()}
    seconds = {name: [] for name in variants}
    peaks = {}
    for _ in range(args.rounds):
        for name, more in variants.items():
            took, peaks[name] = train(more)
            seconds[name] += took

    print(f"{args.ranks} ranks; median of {args.rounds} x {args.steps} steps")
    print(f"{'budget':>10} {'activations':>12} {'peak, planned':>14} {'measured':>9} {'ms, planned':>12} {'measured':>9} {'error':>7} "
          f"{'spread':>7} {'slower, planned':>16} {'measured':>9}")
    base_planned, base = plans["none"]["step_seconds"]["total"], statistics.median(seconds["none"])
    for name in variants:
        planned, median = plans[name]["step_seconds"]["total"], statistics.median(seconds[name])
        memory = plans[name]["memory_bytes"]
        print(f"{name:>10} {memory['peak_of']['activations'] / MIB:12.1f} {memory['peak'] / MIB:14.1f} {peaks[name] / MIB:9.1f} "
              f"{1e3 * planned:12.0f} {1e3 * median:9.0f} {100 * (planned / median - 1):+6.1f}% {100 * spread(seconds[name]):6.1f}% "
              f"{100 * (planned / base_planned - 1):+15.1f}% {100 * (median / base - 1):+8.1f}%")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""bench/plan_accuracy.py CONFIG [--ranks N] [--budgets N] [--steps N] [-- SETTINGS...]: predicted against measured.

For activation budgets from the smallest that is possible to what policy none needs, a process of its own makes the plan
(`regather plan`), then the ranks train a few steps under it. Calibrate first:

    tools/mpirun 2 build/cpu/regather plan CONFIG --calibrate
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "build/cpu/regather"


def run(command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr}")


def spread(seconds):
    """Half the range of a run's steps, by their median."""
    return (seconds["max"] - seconds["min"]) / 2 / seconds["median"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budgets", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("settings", nargs="*", help="more --set a.b=v")
    args = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp())
    sets = [word for setting in args.settings for word in ("--set", setting)]

    def plan(more):
        run([PROGRAM, "plan", args.config, "--world", args.ranks, "--json", folder / "plan.json", *sets, *more])
        return json.loads((folder / "plan.json").read_text())

    points = plan([])["frontier"]["points"]
    least, most = points[0]["bytes"], points[-1]["bytes"]
    print(f"{'budget MiB':>10} {'peak, planned':>14} {'measured':>9} {'step ms, planned':>17} {'measured':>9} {'error':>7} {'spread':>7}")
    for i in range(args.budgets):
        budget = least + (most - least) * i // (args.budgets - 1)
        policy = ["--set", "activation_checkpointing.policy=budget", "--set", f"activation_checkpointing.budget={budget}"]
        planned = plan(policy)
        run([ROOT / "tools/mpirun", args.ranks, PROGRAM, "train", args.config, *sets, *policy, "--set",
             f"train.steps={args.steps}", "--set", f"output={folder / 'run'}", "--overwrite"])
        measured = json.loads((folder / "run/summary.json").read_text())
        mib = 1 << 20
        want, got = planned["step_seconds"]["total"], measured["step_seconds"]["median"]
        print(f"{budget / mib:10.1f} {planned['memory_bytes']['peak'] / mib:14.1f} {measured['memory_bytes']['peak'] / mib:9.1f} "
              f"{1e3 * want:17.1f} {1e3 * got:9.1f} {100 * (want / got - 1):+6.1f}% {100 * spread(measured['step_seconds']):6.1f}%")


if __name__ == "__main__":
    main()

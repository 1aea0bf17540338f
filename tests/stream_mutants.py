#!/usr/bin/env python3
"""tests/stream_mutants.py [--sample N [--seed S]] [--build FOLDER] [PATTERN]: do the tests notice when two streams, or a stream and
the host, are not ordered? Finds every wait, record and choice of a stream in the sources that a GPU runs, by its call. Each is
taken out, or put on another stream, alone; then the tests of orders run on the CUDA emulator. Prints a table; fails if a mutant
survives, or if the tests fail without any. PATTERN (a regular expression): only mutants of matching lines; --sample: so many by
chance, others every day unless there is a seed.

All mutants are one program, in which an environment variable chooses: so each file is compiled once.
"""
import argparse
import datetime
import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("tensor", "dist", "ckpt")
# Of the host alone: its own copies, messages and ranks.
HOST_ONLY = {"tensor/device.cpp", "tensor/copy_thread.cpp", "dist/peers.cpp", "dist/mpi_comm.cpp", "dist/sim_comm.cpp"}
TESTS = "StreamOrders.*"
SLOW_TESTS = "*GpuFailure.*:*CudaTraining.gives_the_same_bits_under_every_strategy/gpt2_on_two"  # only of what those let live

# What changes no order: file, part of "what: line", reason. Each has to be there.
EQUIVALENT = [
    ("dist/communicator.cpp", 'no host wait: peers_->wait("", ', "the loop around it polls the device as well; of ranks that fail it hears later"),
    ("ckpt/stack_runner.cpp", "no wait: if (std::ranges::find(reduces, unit)",
     "a unit ends its reduction before the next one and at the end of the step; here it only gives memory back sooner"),
    ("dist/shard_unit.cpp", "no wait: if (running_stays() && reducing_) finish_reduction();",
     "more than a wait, and on a CPU as well: mutants.sh takes it out"),
]

STREAMS = r"Stream::(?:Compute|Gather|Reduce|ToHost|ToDevice)\b"
NOT_ENQUEUING = {"copies", "copy_seconds", "times_of"}
SWITCH = """#pragma once
#include <cstdlib>
inline bool mutant(int number) {
  static const char* const chosen = std::getenv("REGATHER_MUTANT");
  return chosen && std::atoi(chosen) == number;
}
"""


def without_comments(text):
    """The text with blanks for comments and strings."""
    blank = lambda m: re.sub(r"[^\n]", " ", m.group())
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Fa-f])\'(?:\\.|[^\'\\])\'', blank, text, flags=re.S)


def closing(text, at):
    """Behind the bracket that closes the one at `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i + 1
    raise ValueError("a bracket that nothing closes")


def opening(text, at):
    """The innermost bracket that is open at `at`."""
    depth = 0
    for i in range(at - 1, -1, -1):
        depth += (text[i] in ")]}") - (text[i] in "([{")
        if depth < 0:
            return i
    return 0


def receiver(text, dot):
    """Where the expression begins that ends before the dot (or arrow)."""
    i = dot
    while True:
        while text[i - 1] in ")]":
            i = opening(text, i - 1)
        while re.match(r"[\w]", text[i - 1]):
            i -= 1
        if text[i - 1] == ".":
            i -= 1
        elif text[i - 2:i] in ("->", "::"):
            i -= 2
        else:
            return i


def mutants_of(text):
    """(what, begin, end, what is there instead) of each mutant."""
    found = []
    for m in re.finditer(r"(?:\.|->)(wait|done|record)\(", text):
        begin, end = receiver(text, m.start()), closing(text, m.end() - 1)
        arguments = text[m.end():end - 1]
        if m[1] == "record":
            in_wait = re.search(r"wait\([^;]*$", text[:begin]) and text[opening(text, begin) - 4:][:4] == "wait"
            if re.search(r"[sS]tream", arguments) and not in_wait:
                found.append(("no record", begin, end, "::regather::Event()"))
        elif m[1] == "done":
            found.append(("not polled", begin, end, "true"))
        else:
            streams = re.match(r"\s*(?:Stream::|stream\b)", arguments)
            found.append(("no wait" if streams else "no host wait", begin, end, "void()"))
    for m in re.finditer(r"\(\*waiter\)\(|(?<![\w:~])(?:unit->)?(?:wait_for_gather|finish_reduction|finish_refresh)\(", text):
        if not re.search(r"(?:void|bool) $", text[:m.start()]):
            what = "no host wait" if "waiter" in m[0] else "no wait"
            found.append((what, m.start(), closing(text, m.end() - 1), "void()"))
    for m in re.finditer(r"\bcuda(?:StreamWaitEvent|EventRecord|EventQuery|(?:Stream|Event|Device)Synchronize)\(", text):
        found.append(("no " + m[0][4:-1], m.start(), closing(text, m.end() - 1), "cudaSuccess"))
    for m in re.finditer(STREAMS, text):
        bracket = opening(text, m.start())
        callee = re.search(r"(\w*)\s*$", text[:bracket])[1]
        first_of_wait = callee == "wait" and not text[bracket + 1:m.start()].strip()
        fixed = re.search(r"(?:case|[!=]=)\s*$|constexpr[^;]*$", text[:m.start()])
        if callee not in NOT_ENQUEUING and not first_of_wait and not fixed and not re.match(r"\s*[!=]=", text[m.end():]):
            other = "ToDevice" if m[0].endswith("ToHost") else "ToHost"
            found.append((f"on {other}", m.start(), m.end(), f"Stream::{other}"))
    return found


def find_mutants():
    """All of them, and by file the text in which each has its switch."""
    mutants, switched, met = [], {}, set()
    for path in sorted(p for layer in LAYERS for p in (ROOT / layer).rglob("*.cpp")):
        name = str(path.relative_to(ROOT))
        if name in HOST_ONLY:
            continue
        text = path.read_text()
        found = mutants_of(without_comments(text))
        insertions = []
        for what, begin, end, instead in found:
            line = text.count("\n", 0, begin) + 1
            shown = f"{what}: {text.splitlines()[line - 1].split(' // ')[0].strip()}"
            reasons = [key for key in EQUIVALENT if key[0] == name and key[1] in shown]
            met.update(reasons)
            if reasons:
                continue
            number = len(mutants)
            mutants.append((number, name, line, shown))
            insertions.append((begin, 1, begin - end, f"(mutant({number}) ? {instead} : "))
            insertions.append((end, 0, end - begin, ")"))
        for at, _, _, inserted in sorted(insertions, reverse=True):
            text = text[:at] + inserted + text[at:]
        if insertions:
            switched[name] = text
    for key in EQUIVALENT:
        if key not in met:
            sys.exit(f"stream_mutants: there is no '{key[1]}' in {key[0]}")
    return mutants, switched


def build(build_folder, work, switched):
    """The tests, with these files in place of the same ones."""
    commands = {entry["file"]: entry for entry in json.loads((build_folder / "compile_commands.json").read_text())}
    work.mkdir(exist_ok=True)
    (work / "mutant.h").write_text(SWITCH)

    def compile_one(name):
        entry, source = commands[str(ROOT / name)], work / name
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(switched[name])
        words = shlex.split(entry["command"])
        words[words.index("-o") + 1] = str(source.with_suffix(".o"))
        words[words.index(str(ROOT / name))] = str(source)
        subprocess.run([*words, "-O0", "-g0", "-w", "-include", str(work / "mutant.h")], cwd=entry["directory"], check=True)
        return str(source.with_suffix(".o"))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, switched))
    program = work / "cuda_tests"
    link = subprocess.run(["ninja", "-C", build_folder, "--quiet", "-t", "commands", "-s", "tests/cuda_emu/cuda_tests"], check=True, capture_output=True,
                          text=True).stdout
    link = re.sub(r" -o \S+", lambda _: f" {shlex.join(objects)} -o {shlex.quote(str(program))}", link, count=1)
    program.unlink(missing_ok=True)
    subprocess.run(link, shell=True, cwd=build_folder, check=True)  # objects come before libraries, of which a linker takes no second one
    return program


def run(program, tests, limit, number=None):
    """(seconds, the first test that failed, or another end; empty: all passed)."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", **({} if number is None else {"REGATHER_MUTANT": str(number)}))
    begin = time.monotonic()
    try:
        done = subprocess.run([program, "--gtest_brief=1", "--gtest_fail_fast", f"--gtest_filter={tests}"], env=environment, timeout=limit,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except subprocess.TimeoutExpired:
        return time.monotonic() - begin, "the time limit", ""
    failed = re.search(r"\[  FAILED  \] ([\w./]+)", done.stdout)
    verdict = "" if done.returncode == 0 else failed[1] if failed else f"exit code {done.returncode}"
    return time.monotonic() - begin, verdict, done.stdout


def baseline(program, tests):
    """The seconds that a mutant may run; one that hangs is noticed."""
    seconds, failed, said = run(program, tests, 300)
    if failed:
        print(said)
        sys.exit(f"stream_mutants: without any mutant {tests} ends with {failed}")
    return 10 + 5 * seconds


def judge(program, tests, mutants):
    """Prints how each ends, and returns those that survive."""
    survivors = []
    limit = baseline(program, tests)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, (_, failed, _) in zip(mutants, pool.map(lambda m: run(program, tests, limit, m[0]), mutants)):
            _, name, line, shown = mutant
            print(f"{f'{name}:{line}':28} {shown[:90]:90} {f'killed by {failed}' if failed else 'survived ' + tests}", flush=True)
            if not failed:
                survivors.append(mutant)
    return survivors


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=int(datetime.date.today().strftime("%Y%m%d")))
    parser.add_argument("--build", type=lambda folder: Path(folder).resolve(), default=ROOT / "build/cpu", metavar="FOLDER", help="where cuda_tests is built")
    parser.add_argument("--list", action="store_true", help="only what there is")
    parser.add_argument("pattern", nargs="?", default="")
    arguments = parser.parse_args()
    begin = time.monotonic()
    mutants, switched = find_mutants()
    chosen = [m for m in mutants if re.search(arguments.pattern, f"{m[1]}:{m[2]} {m[3]}")]
    if arguments.sample is not None:
        chosen = sorted(random.Random(arguments.seed).sample(chosen, min(arguments.sample, len(chosen))))
    if not chosen:
        sys.exit(f"stream_mutants: none matches {arguments.pattern}")
    if arguments.list:
        for number, name, line, shown in chosen:
            print(f"{number:4} {name}:{line}  {shown}")
        return
    work = arguments.build / "stream_mutants"
    program = build(arguments.build, work, {name: switched[name] for name in {m[1] for m in chosen}})
    built = time.monotonic() - begin
    survivors = judge(program, TESTS, chosen)
    if survivors:
        survivors = judge(program, SLOW_TESTS, survivors)
    sample = "" if arguments.sample is None else f" sampled with seed {arguments.seed}"
    print(f"stream_mutants: {len(chosen) - len(survivors)} of {len(chosen)}{sample} killed in {time.monotonic() - begin:.0f} s, of which"
          f" {built:.0f} s to build")
    sys.exit(1 if survivors else 0)


main()

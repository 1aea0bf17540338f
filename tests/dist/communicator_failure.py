#!/usr/bin/env python3
"""communicator_failure.py PROGRAM SOURCE: ranks that fail under a real mpirun. Reads every rank's own lines and exit code (not
mpirun's, which speaks on the other output), and that each scenario ends soon. PROGRAM is failing_mpi_rank.

Without recovery mpirun kills all other ranks soon after the first has ended, also between a rank's end and the note of its
code: there only the lines are certain."""
import pathlib
import re
import subprocess
import sys
import tempfile
import time

PROGRAM, SOURCE = sys.argv[1], pathlib.Path(sys.argv[2])
LIMIT_SECONDS = 30  # however busy the machine is

RECOVERY = "--enable-recovery"

# Notes each rank's exit code; a signal to the process group ends the program, not the note.
WRAPPER = 'trap : TERM; "$1" "$2"; code=$?; echo $code > "$3/code.$OMPI_COMM_WORLD_RANK"; exit $code'


class Run:
    def __init__(self, scenario, ranks, *mpirun_options):
        self.scenario = scenario
        with tempfile.TemporaryDirectory() as folder:
            command = [SOURCE / "tools/mpirun", str(ranks), *mpirun_options, "bash", "-c", WRAPPER, "rank", PROGRAM, scenario, folder]
            begun = time.monotonic()
            self.process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
            self.seconds = time.monotonic() - begun
            codes = {int(path.suffix[1:]): path.read_text().strip() for path in pathlib.Path(folder).glob("code.*")}
        self.codes = {rank: int(code) for rank, code in codes.items() if code}
        self.lines = {rank: re.findall(rf"^rank {rank}: (.*)$", self.process.stdout, re.M) for rank in range(ranks)}
        self.ranks = ranks

    def show(self):
        return f"{self.scenario}, {self.ranks} ranks, {self.seconds:.1f} s, codes {self.codes}\n{self.process.stdout}{self.process.stderr}"

    def expect(self, rank, code, *parts):
        """The rank's exit code, and that one line of its own contains every part."""
        assert self.codes.get(rank) == code, f"rank {rank} ended with {self.codes.get(rank)}, not {code}"
        self.expect_line(rank, *parts)

    def expect_line(self, rank, *parts):
        assert any(all(part in line for part in parts) for line in self.lines[rank]), f"no line of rank {rank} contains {parts}"


def an_exception_ends_all_ranks(ranks):
    run = Run("throw", ranks, RECOVERY)
    yield run
    for rank in range(ranks):
        run.expect(rank, 1, "step 3: the loss is nan" if rank == 1 else "step 3: all_gather of block 2 (forward): rank 1 left: step 3: the loss is nan")
        assert len(run.lines[rank]) == 1


def the_code_of_mpirun_is_the_originators():
    run = Run("memory", 2)
    yield run
    for rank in range(2):
        run.expect_line(rank, "step 3:", "over the limit")
    assert run.process.returncode == 3, f"mpirun ended with {run.process.returncode}"


def the_code_is_the_originators():
    run = Run("memory", 3, RECOVERY)
    yield run
    for rank in range(3):
        run.expect(rank, 3, "step 3:", "over the limit")


def a_rank_fails_with_a_collective_under_way():
    run = Run("throw_pending", 3, RECOVERY)
    yield run
    for rank in range(3):
        run.expect(rank, 1, "the loss is nan")


def a_killed_rank_is_named_before_mpirun_kills_the_others():
    run = Run("kill", 3)
    yield run
    for rank in (0, 2):
        run.expect_line(rank, "step 3: all_gather of block 2 (forward)", f"rank {rank} is at step 3, in all_gather of block 2", "rank 1 is gone")


def a_killed_rank_is_named_under_recovery():
    run = Run("kill", 3, RECOVERY)
    yield run
    for rank in (0, 2):
        run.expect(rank, 4, "step 3: all_gather of block 2 (forward)", "rank 1 is gone")


def a_rank_that_stands_still_ends_the_run_by_the_timeout():
    run = Run("stop", 2)
    yield run
    run.expect(0, 4, "step 3: all_gather of block 2 (forward): no progress for 2.", "rank 1 gives no answer")


def a_rank_that_skips_a_collective_is_named_with_both_sides():
    run = Run("skip", 2, RECOVERY)
    yield run
    run.expect(0, 4, "rank 0 is at step 3, in all_gather of block 2 (forward) [fp32 x 100000]", "rank 1 is at step 3, in reduce_scatter of block 2 (backward)")
    run.expect(1, 4, "step 3", "reduce_scatter of block 2 (backward)", "all_gather of block 2 (forward)")


def checked_mode_refuses_a_different_collective():
    run = Run("checked", 3, RECOVERY)
    yield run
    for rank in range(3):
        run.expect(rank, 1, "rank 1 calls reduce_scatter of block 2 (backward) [fp32 x 150000], rank 0 calls all_gather of block 2 (forward) [fp32 x 150000]")


def different_configurations_are_refused_at_the_start():
    run = Run("configuration", 3, RECOVERY)
    yield run
    for rank in range(3):
        run.expect(rank, 2, "rank 1 has layers: 6, rank 0 has layers: 4")


def a_termination_signal_to_all_ranks_lets_the_step_end():
    run = Run("terminated", 2)
    yield run
    for rank in range(2):
        run.expect(rank, 0, "done")
    assert any("warning: no progress" in line and "in all_gather" in line for line in run.lines[0]), "no line about the pending collective"


def a_late_rank_is_waited_for():
    run = Run("sleep", 2)
    yield run
    for rank in range(2):
        run.expect(rank, 0, "done")


def main():
    tests = [
        lambda: an_exception_ends_all_ranks(2), lambda: an_exception_ends_all_ranks(4), the_code_is_the_originators, the_code_of_mpirun_is_the_originators,
        a_rank_fails_with_a_collective_under_way, a_killed_rank_is_named_before_mpirun_kills_the_others,
        a_killed_rank_is_named_under_recovery, a_rank_that_stands_still_ends_the_run_by_the_timeout,
        a_rank_that_skips_a_collective_is_named_with_both_sides, checked_mode_refuses_a_different_collective,
        different_configurations_are_refused_at_the_start, a_termination_signal_to_all_ranks_lets_the_step_end, a_late_rank_is_waited_for,
    ]
    failures = 0
    limit = LIMIT_SECONDS + Run("none", 4).seconds  # what starting and ending four ranks takes on this machine, now
    for test in tests:
        steps = test()
        run = next(steps)
        try:
            for _ in steps:
                pass
            assert run.seconds < limit, f"took {run.seconds:.1f} s"
            print(f"ok: {steps.__name__} ({run.seconds:.1f} s)", flush=True)
        except AssertionError as error:
            failures += 1
            print(f"FAILED: {steps.__name__}: {error}\n{run.show()}", flush=True)
    return 1 if failures else 0


sys.exit(main())

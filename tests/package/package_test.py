#!/usr/bin/env python3
"""package_test.py SOURCE BUILD CONFIGURATION: installs BUILD, builds the examples against what was installed, and trains with
them: alone and on two ranks, with and without checkpointing. Nothing of the source folder is in reach but the examples."""
import json
import pathlib
import re
import shutil
import subprocess
import sys

source, build, configuration = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
stage, work = build / "stage", build / "examples"
CLOSE = 2e-6  # of a loss, between numbers of ranks; see docs/numerics.md


def run(*command, code=0, **options):
    done = subprocess.run([str(c) for c in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    if done.returncode != code:
        sys.exit(f"{' '.join(str(c) for c in command)}\nended with {done.returncode}, not {code}:\n{done.stdout}")
    return done.stdout


def cached(name):
    found = re.search(rf"^{name}:\w+=(.*)$", (build / "CMakeCache.txt").read_text(), re.M)
    return found[1] if found else ""


def build_against_stage(folder, name):
    kept = [f"-D{key}={cached(key)}" for key in ("CMAKE_CXX_COMPILER", "CMAKE_CXX_COMPILER_LAUNCHER") if cached(key)]
    log = run("cmake", "-G", cached("CMAKE_GENERATOR"), "-S", folder, "-B", work / name, f"-DCMAKE_PREFIX_PATH={stage}",
              f"-DCMAKE_BUILD_TYPE={configuration}", "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror", "-DCMAKE_NO_SYSTEM_FROM_IMPORTED=ON", *kept)
    found = re.search(r"Regather_DIR:PATH=(.*)", (work / name / "CMakeCache.txt").read_text())
    assert found and pathlib.Path(found[1]).is_relative_to(stage), f"not the installed package:\n{log}"
    run("cmake", "--build", work / name)
    return work / name / name


def headers_compile_alone():
    """Every installed header can be included from outside, whatever was included before it."""
    include = stage / "include/regather"
    headers = sorted(path.relative_to(include).as_posix() for path in include.rglob("*.h"))
    assert "tensor/tape.h" in headers and "launcher/regather.h" in headers, headers
    folder = work / "headers_source"
    folder.mkdir(parents=True, exist_ok=True)
    for i, order in enumerate((headers, headers[::-1])):
        (folder / f"{i}.cpp").write_text("".join(f'#include "{header}"\n' for header in order))
    (folder / "main.cpp").write_text("int main() { return 0; }\n")
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(headers LANGUAGES CXX)\nfind_package(Regather 0.1 REQUIRED)\n"
        "add_executable(headers main.cpp 0.cpp 1.cpp)\n"
        "target_link_libraries(headers regather::tensor regather::dist regather::ckpt regather::model regather::train)\n")
    build_against_stage(folder, "headers")


def on_ranks(ranks, program, *arguments):
    return run(stage / "bin/regather_mpirun", ranks, program, *arguments)


def train_own(program, ranks, policy):
    output = work / f"own_{policy}_{ranks}"
    settings = {"output": output, "train.steps": 3, "train.micro_batch": 8 // ranks, "activation_checkpointing.policy": policy}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [program, "train", source / "examples/own_block/own.yaml", "--overwrite", *sets]
    print(run(*command) if ranks == 1 else on_ranks(ranks, *command))
    return json.loads((output / "summary.json").read_text())


def own_block(with_mpi):
    program = build_against_stage(source / "examples/own_block", "own_block")
    print(run(program.parent / "own_model_test"))
    config = source / "examples/own_block/own.yaml"
    assert "  type: own\n" in run(program, "check", config)
    assert "gpt2, llama, own" in run(program, "help", "model.type")
    assert "did you mean own?" in run(program, "check", config, "--set", "model.type=owm", code=2)
    assert "model.type" in run(stage / "bin/regather", "check", config, code=2)  # only the person's program has it
    compared = run(program, "compare", config, "--policies", "none,full", "--steps", 1, "--rounds", 1, "--overwrite",
                   "--set", "train.micro_batch=8", "--set", f"output={work / 'own_compared'}")
    assert "gradients identical" in compared, compared
    runs = {(ranks, policy): train_own(program, ranks, policy)
            for ranks in ((1, 2) if with_mpi else (1,)) for policy in ("none", "full")}
    for (ranks, policy), summary in runs.items():
        plain, alone = runs[ranks, "none"], runs[1, "none"]
        assert summary["world"] == ranks and summary["config"]["model"]["type"] == "own", summary["config"]
        assert summary["collectives"]["expected_matches"], summary["collectives"]
        for key in ("loss", "grad_norm"):
            assert len(summary[key]) == 3 and summary[key] == plain[key], (ranks, policy, key, summary[key], plain[key])
        assert all(abs(a - b) <= CLOSE * b for a, b in zip(summary["loss"], alone["loss"])), (summary["loss"], alone["loss"])
        again = summary["checkpointing"]["recomputed_flops"] / summary["checkpointing"]["forward_flops"]
        assert again > 0.2 if policy == "full" else again < 0.02, (policy, again)  # none: norms alone
    for ranks in (ranks for ranks, policy in runs if policy == "full"):
        kept, rerun = (runs[ranks, policy]["memory_bytes"]["peak_of"]["activations"] for policy in ("none", "full"))
        assert rerun < kept, (ranks, rerun, kept)


def train_loop(with_mpi):
    program = build_against_stage(source / "examples/train_loop", "train_loop")
    outputs = [run(program)] + ([on_ranks(2, program)] if with_mpi else [])
    losses = [[float(loss) for loss in re.findall(r"^step \d+ loss (\S+)", output, re.M)] for output in outputs]
    for of_run in losses:
        assert len(of_run) == 30 and of_run[-1] < 0.5 * of_run[0], of_run
        assert abs(of_run[0] - losses[0][0]) <= CLOSE * losses[0][0], (of_run[0], losses[0][0])
    print(outputs[-1])


def main():
    shutil.rmtree(stage, ignore_errors=True)
    run("cmake", "--install", build, "--prefix", stage, "--config", configuration)
    with_mpi = "set(Regather_MPI TRUE)" in next(stage.rglob("RegatherConfig.cmake")).read_text()
    headers_compile_alone()
    own_block(with_mpi)
    train_loop(with_mpi)


if __name__ == "__main__":
    main()

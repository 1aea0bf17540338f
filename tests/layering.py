#!/usr/bin/env python3
"""layering.py ROOT [TABLE]: who may include whom, and what a file has to look like. Prints every violation as file:line.

TABLE is what CMake wrote, a line `layer=lower,lower` each; without it the add_layer() calls in CMakeLists.txt are read. A layer
may include itself and the layers it DEPENDS on, nothing else; libraries with a place of their own are included only there.
"""
import fnmatch
import pathlib
import re
import sys

HEADER_LINES = 200
SOURCE_LINES = 450
LONGER = {"launcher/config.h": 400}  # a described field for every key: a list, not code

# What a library's headers are called, and the files that may include them.
LIBRARIES = [
    ("MPI", r"mpi(-ext|io)?\.h$", ["dist/mpi_*", "tests/*_mpi_test.cpp", "tests/dist/*mpi_*", "bench/*"]),
    ("NCCL", r"nccl.*\.h$", ["dist/nccl_*.cpp", "tests/cuda_emu/*"]),
    ("CUDA", r"(cuda|cublas|nvtx|cub/|cooperative_groups|driver_types|device_launch).*", ["tensor/cuda/*", "*.cu", "*.cuh", "dist/nccl_*.cpp", "dist/staged_*.cpp", "tests/cuda_emu/*"]),
    ("oneDNN", r"(oneapi/dnnl/|dnnl).*", ["tensor/ops/gemm*.cpp", "tensor/ops/*/gemm*.cpp"]),
    ("yaml-cpp", r"yaml-cpp/.*", ["launcher/config*.cpp"]),
    ("CLI11", r"CLI/.*", ["launcher/*.cpp"]),
    ("nlohmann_json", r"nlohmann/.*", ["launcher/*.cpp", "tests/*"]),
    ("spdlog", r"spdlog/.*", ["launcher/*.cpp"]),
    ("xxHash", r"xxhash\.h$", ["*.cpp"]),
    ("GoogleTest", r"(gtest|gmock)/.*", ["tests/*"]),
]
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')
ENDS_THE_PROCESS = re.compile(r"(?<![\w.>])(?:std::|::)?(?:exit|_exit|_Exit|quick_exit|abort|terminate)\s*\(")


def read_table(root, path):
    if path:
        pairs = [line.split("=", 1) for line in pathlib.Path(path).read_text().split()]
        return {name: set(filter(None, lower.split(","))) for name, lower in pairs}
    calls = re.findall(r"^add_layer\((\w+)(?:\s+DEPENDS\s+([\w\s]+))?\)", (root / "CMakeLists.txt").read_text(), re.M)
    return {name: set(lower.split()) for name, lower in calls}


def check_include(name, layer, quoted, angled, table, root):
    """The violations of one include line."""
    included = quoted or angled
    for library, pattern, places in LIBRARIES:
        if re.match(pattern, included) and not any(fnmatch.fnmatch(name, place) for place in places):
            yield f"{library} belongs in {' '.join(places)}"
    if not quoted:
        if included.split("/")[0] in table and (root / included).exists():
            yield f"<{included}> is ours: write it with quotes"
        return
    top = included.split("/")[0]
    if name.startswith("examples/") and (root / name).parent.joinpath(included).exists():
        return  # a project of its own
    if not (root / included).exists():
        yield f'"{included}" is not a path from the root of the project'
    elif layer and top != layer and top not in table[layer]:
        allowed = ", ".join(sorted(table[layer])) or "no other layer"
        yield f"{layer} may not include {top} (it may include {allowed})"


def check_file(path, root, table):
    name = path.relative_to(root).as_posix()
    top = name.split("/")[0]
    layer = top if top in table else None
    lines = path.read_text().split("\n")
    header = path.suffix in (".h", ".cuh")
    for number, line in enumerate(lines, 1):
        if match := INCLUDE.match(line):
            for message in check_include(name, layer, match[1], match[2], table, root):
                yield name, number, message
        elif layer and not name.endswith("/main.cpp"):
            if ENDS_THE_PROCESS.search(line.split("//")[0]):
                yield name, number, "only main() ends the process; throw an error"
    count = len(lines) - 1
    limit = LONGER.get(name, HEADER_LINES if header else SOURCE_LINES)
    if layer and count > limit:
        yield name, limit + 1, f"{count} lines; a {'header' if header else 'source'} has at most {limit}"
    if header:
        if "#pragma once" not in lines:
            yield name, 1, "a header has #pragma once"
        if layer and not lines[0].startswith("//"):
            yield name, 1, "a header opens with a comment: what it is, its invariant, what it does not do"


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    root = pathlib.Path(sys.argv[1]).resolve()
    table = read_table(root, sys.argv[2] if len(sys.argv) == 3 else None)
    if not table:
        sys.exit("layering: no layers found")
    unknown = {f"{name} depends on {lower}, which is no layer" for name, all_lower in table.items() for lower in all_lower - set(table)}
    missing = {f"the layer {name} has no folder" for name in table if not (root / name).is_dir()}
    folders = [root / folder for folder in [*table, "tests", "bench", "examples"]]
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh"))
    found = [violation for path in files for violation in check_file(path, root, table)]
    for message in sorted(unknown | missing):
        print(f"layering: {message}")
    for name, number, message in found:
        print(f"{name}:{number}: {message}")
    if found or unknown or missing:
        sys.exit(1)
    print(f"layering: {len(files)} files of {len(table)} layers are in order")


if __name__ == "__main__":
    main()

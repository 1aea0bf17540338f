#!/usr/bin/env bash
# launch_e2e_test.sh PROGRAM SOURCE: the commands that the documentation shows work as they are written, on this machine, as this
# user; and how a run is launched (bound or not, how many threads, more ranks than CPUs, processes or threads) is said at its
# start and changes no number; the number of threads changes rounding at most.
source "$2/tests/launcher/e2e_functions.sh"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1  # for mpirun by itself

cat >my.yaml <<YAML
model: {layers: 2, hidden: 64, heads: 2, max_sequence: 64}
data: {files: [$source/tests/golden/text.txt], sequence: 64}
train: {steps: 4, micro_batch: 2}
output: run
YAML

# From --help, the README and the first configuration: on small sizes, and for a step.
mkdir -p build/cpu && ln -s "$(realpath "$program")" build/cpu/regather
ln -s "$source/tools" tools
mkdir configs
sed 's/^  layers:.*/  layers: 2/; s/^  hidden:.*/  hidden: 48/; s/^output:.*/output: run/' "$source/configs/quickstart.yaml" >configs/quickstart.yaml
shown=$({ "$program" --help; cat "$source/README.md" "$source/configs/quickstart.yaml"; } |
  sed -nE 's/^#? *(tools\/mpirun [0-9]+ build\/cpu\/regather [a-z]+ .*)$/\1/p' |
  sed 's/ *#.*//' | sort -u)
[[ $(wc -l <<<"$shown") -ge 4 ]] || fail "too few commands were found: $shown"
while read -r command; do
  rm -rf run
  read -ra words <<<"$command"
  [[ $command == *" train "* && $command != *--profile* ]] && words+=(--set train.stop_after=1)
  run 0 "${words[@]}"
done <<<"$shown"

cpus=$(nproc)
# train NAME COMMAND...: trains my.yaml with what COMMAND launches
train() { run 0 "${@:2}" train my.yaml --set output="$1" "${sets[@]}"; }
same() { # NAME REFERENCE: every number of a run, to the bit
  python3 - "$1" "$2" <<'PY' || fail "$1 has other numbers than $2"
import json, sys
a, b = (json.load(open(f"{name}/summary.json")) for name in sys.argv[1:])
assert a["loss"] == b["loss"] and a["grad_norm"] == b["grad_norm"], (a["loss"], b["loss"])
PY
}
near() { # NAME REFERENCE: the first step within the bounds of docs/numerics.md, and not far later
  python3 - "$1" "$2" <<'PY' || fail "$1 is not near $2"
import json, sys
a, b = (json.load(open(f"{name}/summary.json")) for name in sys.argv[1:])
assert abs(a["loss"][0] - b["loss"][0]) <= 2e-6 * b["loss"][0], (a["loss"], b["loss"])
assert abs(a["grad_norm"][0] - b["grad_norm"][0]) <= 1e-5 * b["grad_norm"][0], (a["grad_norm"], b["grad_norm"])
assert all(abs(x - y) <= 1e-5 * y for x, y in zip(a["loss"], b["loss"])), (a["loss"], b["loss"])
PY
}

sets=()
train two "$mpirun" 2 "$program"
says out "2 (mpi), 1 thread each, $cpus CPU"
train two_again "$mpirun" 2 "$program"
same two_again two
for threads in 2 4; do
  sets=(--set threads=$threads)
  train "two_$threads" env OMP_NUM_THREADS=$threads "$mpirun" 2 "$program"
  says out "2 (mpi), $threads threads each, $cpus CPU"
  ((2 * threads <= cpus)) || lines out "  warning: .*slower, same numbers" 1
  near "two_$threads" two
done

if ((cpus >= 2)) && [[ -z ${REGATHER_MPIRUN-} ]]; then # mpirun by itself ties each of two ranks to a core
  sets=(--set threads=2)
  train two_bound mpirun -np 2 --bind-to core "$program"
  says out "2 threads each, 1 CPU allowed"
  says out "warning: the 2 threads of a rank share 1 CPU"
  same two_bound two_2
fi

sets=(--set communication.backend=sim --set communication.sim_ranks=2)
train two_sim taskset -c "$(taskset -cp $$ | grep -o '[0-9]*' | sed -n 2p)" "$program"
says out "2 (sim), 1 thread each, 1 CPU allowed"
says out "warning: 2 ranks of 1 thread share 1 CPU"
same two_sim two

sets=()
train more "$mpirun" $((cpus + 2)) "$program"
says out "$((cpus + 2)) (mpi), 1 thread each, $cpus CPU"
says out "warning: $((cpus + 2)) ranks of 1 thread share $cpus CPU"
train more_again "$mpirun" $((cpus + 2)) "$program"
same more_again more
echo "however it is launched, it runs and the numbers are the same"

# The program as a person uses it: exit codes, who speaks under mpirun, what a run leaves behind.
source "$2/tests/launcher/e2e_functions.sh"

head -c 20000 /usr/share/common-licenses/GPL-3 >text
cat >c.yaml <<YAML
model: {layers: 2, hidden: 32, heads: 2, max_sequence: 32}
data: {files: [text], sequence: 32}
train: {steps: 3, micro_batch: 2}
activation_checkpointing: {policy: every_n_layers}
output: run
YAML

run 0 "$program" check c.yaml
says out "# checkpointing: every_n_layers 2: layers 0 of 2"
cp out effective.yaml
run 0 "$program" check effective.yaml
diff <(grep -v '^#' out) <(grep -v '^#' effective.yaml) || fail "the effective configuration does not check to itself"

# Every rank leaves with the code; one of them says why, whichever ends first.
for ranks in 2 3; do
  run 2 "$mpirun" $ranks "$program" train c.yaml --set train.stesp=2
  lines err "regather: error:" 1
  says err "did you mean train.steps?"
  run 2 "$mpirun" $ranks "$program" train c.yaml --set train.global_batch=100
  lines err "regather: error:" 1
  says err "x ranks $ranks = "
done
# Without a GPU, or without CUDA in the program; a machine with one is not asked.
run 0 "$program" check c.yaml --set device=cuda
if ! grep -q "^# device: cuda: " out; then
  says out "# device: cuda; "
  run 2 "$program" train c.yaml --set device=cuda
  lines err "regather: error: --set device=cuda: device: value cuda, but " 1
  lines err "" 1
fi
run 2 "$mpirun" 2 "$program" train c.yaml --set device=cuda
lines err "regather: error:" 1
says err "communication.backend: value mpi moves the host's memory, but device is cuda and there are 2 ranks"
[[ ! -e run ]] || fail "a refused run made its folder"

run 0 "$mpirun" 2 "$program" train c.yaml --json copy.json
lines out "^step ./3  loss " 3
says out "2 (mpi), 1 thread each"
grep -q $'\033' out && fail "control codes in a file"
lines out "^done: 3 steps, loss .*; see run/summary.json$" 1
cmp copy.json run/summary.json || fail "--json is not a copy of summary.json"
python3 - <<'PY' || fail "what the run left behind"
import json
s = json.load(open("run/summary.json"))
assert s["world"] == 2 and s["steps"] == 3 and len(s["loss"]) == 3, s
assert s["checkpointing"]["policy"] == "every_n_layers" and s["collectives"]["expected_matches"] is True
lines = [json.loads(line) for line in open("run/metrics.jsonl")]
assert [line["step"] for line in lines] == [1, 2, 3] and [line["loss"] for line in lines] == s["loss"]
PY
run 0 "$program" check run/config.yaml
says out "# output: holds files already: train refuses it without --overwrite"
run 0 "$program" check run/config.yaml --overwrite
says out "# output: holds files already; --overwrite replaces"

run 2 "$mpirun" 2 "$program" train c.yaml
lines err "regather: error:" 1
says err "holds files already"
touch run/notes
run 0 "$mpirun" 2 "$program" train run/config.yaml --overwrite
[[ -e run/notes ]] || fail "--overwrite removed a file that no run writes"
run 0 "$program" train c.yaml --set communication.backend=sim --set communication.sim_ranks=2 --set output=run_sim
python3 - <<'PY' || fail "ranks as threads and as processes differ"
import json
assert json.load(open("run/summary.json"))["loss"] == json.load(open("run_sim/summary.json"))["loss"]
PY

# On a terminal there is one line that is redrawn, also through mpirun; without colours where they are not wanted.
terminal() { script -qec "$*" /dev/null >out 2>err </dev/null || fail "exit code $? on a terminal: $*"; }
for launch in "" "$mpirun 2 "; do
  TERM=xterm terminal "$launch$program train c.yaml --overwrite"
  grep -q $'\r\033\[K\[.*\] *.*3/3  loss [0-9.]*  [0-9]* tok/s  [0-9.]* [KM]iB  [0-9:]* left' out || fail "no bar"
  grep -q $'\033\[32m' out || fail "no colours"
  lines out "^step ./3  loss " 0
  TERM=xterm NO_COLOR=1 terminal "$launch$program train c.yaml --overwrite"
  grep -q $'\033\[[0-9]*m' out && fail "colours that are not wanted"
done

# Evaluations are in the summary, and in what was predicted and expected.
run 0 "$mpirun" 2 "$program" train c.yaml --set train.steps=4 --set eval='{every: 2, batches: 3}' --set output=run_eval
python3 - <<'PY' || fail "the evaluations of a run"
import json
s = json.load(open("run_eval/summary.json"))
assert [e["step"] for e in s["eval"]] == [2, 4] and all(0 < e["loss"] < 7 for e in s["eval"]), s["eval"]
assert s["collectives"]["expected_matches"] is True and s["memory_bytes"]["peak"] == s["predicted"]["peak_bytes"]
assert json.load(open("run/summary.json"))["eval"] == []
PY

# What does not fit is refused before anything is made, once, by every command in the same words.
run 3 "$mpirun" 2 "$program" train c.yaml --set memory.limit=64KiB --set output=run_small
lines err "regather: error:" 1
says err "--set memory.limit=64KiB: memory.limit: value 64.0 KiB (65536 bytes) is less than a rank needs with 2 ranks: "
says err "optimizer"
[[ ! -e run_small ]] || fail "a refused run made its folder"
refusal=$(grep "regather: error:" err)
run 3 "$mpirun" 2 "$program" check c.yaml --set memory.limit=64KiB --set output=run_small
[[ $(grep "regather: error:" err) == "$refusal" ]] || fail "check refuses in other words: $refusal"
run 2 "$mpirun" 2 "$program" check c.yaml --json no/such/folder.json
lines err "regather: error: --json: value 'no/such/folder.json' cannot be written" 1
run 2 "$mpirun" 2 "$program" train c.yaml --set output=run_small --json no/such/folder.json
lines err "regather: error: --json: value 'no/such/folder.json' cannot be written" 1
[[ ! -e run_small ]] || fail "a refused run made its folder"

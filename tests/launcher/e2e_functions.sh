# For every x_e2e_test.sh PROGRAM SOURCE, which sources it first: a folder to work in, and commands whose output and errors are kept
# apart, in the files out and err. (Processes write to both: in one file, a line of one comes into the middle of another's.)
set -euo pipefail
program=$1 source=$2
mpirun=$source/tools/mpirun quickstart=$source/configs/quickstart.yaml
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

fail() {
  echo "FAILED: $*" >&2
  sed 's/^/  | /' out err >&2
  exit 1
}
run() {  # CODE COMMAND...
  local code=0 wanted=$1
  shift
  "$@" >out 2>err </dev/null || code=$?
  [[ $code == "$wanted" ]] || fail "exit code $code, not $wanted: $*"
}
says() { grep -qF -- "$2" "$1" || fail "$1 does not say: $2"; }                              # FILE WORDS
lines() { [[ $(grep -c -- "$2" "$1") == "$3" ]] || fail "$1 does not have $3 lines of: $2"; }  # FILE PATTERN NUMBER

# A command in the background; the rest waits for what it says or for its end, however slow the machine is.
begin() {  # COMMAND... (a program, not a function: signals go to it)
  true >out
  "$@" >out 2>err </dev/null &
  pid=$!
}
await() {  # FILE PATTERN
  for ((tenths = 0; tenths < 1200; ++tenths)); do
    if grep -q -- "$2" "$1"; then return; fi
    kill -0 "$pid" 2>/dev/null || fail "ended before $1 had a line of: $2"
    sleep 0.1
  done
  fail "in two minutes, $1 had no line of: $2"
}
end() {  # CODE WHAT
  local code=0
  wait "$pid" || code=$?
  [[ $code == "$1" ]] || fail "$2: exit code $code, not $1"
}

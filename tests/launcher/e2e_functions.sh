# For scripts that keep what a command says in $folder/log: source it after setting folder.
fail() {
  echo "$1"
  cat "$folder/log"
  exit 1
}
expect_code() {  # CODE WHAT COMMAND...
  local code=0 wanted=$1 what=$2
  shift 2
  "$@" || code=$?
  [[ $code == "$wanted" ]] || fail "$what: exit code $code, not $wanted"
}

#!/usr/bin/env bash
# kernel_symbols.sh ISA OBJECT...: what these object files define must be in the namespace of their instruction set, and nothing
# in them may run when the program starts.
set -euo pipefail
isa=$1
shift
foreign=$(nm --demangle --defined-only --print-file-name "$@" | grep -E ' ([A-Zuvw]) |_GLOBAL__sub_I' | grep -vF "regather::$isa::" || true)
if [ -n "$foreign" ]; then
  echo "defined outside namespace regather::$isa:"
  echo "$foreign"
  exit 1
fi

#!/usr/bin/env bash
# kernel_symbols.sh ISA fused|any OBJECT...: what these object files define must be in the namespace of their instruction set,
# nothing in them may run when the program starts, and with `fused` their products and sums must be fused.
set -euo pipefail
isa=$1 arithmetic=$2
shift 2
foreign=$(nm --demangle --defined-only --print-file-name "$@" | grep -E ' ([A-Zuvw]) |_GLOBAL__sub_I' | grep -vF "regather::$isa::" || true)
if [ -n "$foreign" ]; then
  echo "defined outside namespace regather::$isa:"
  echo "$foreign"
  exit 1
fi
if [ "$arithmetic" = fused ] && ! objdump --disassemble "$@" | grep vfmadd >/dev/null; then
  echo "no fused multiply-add in the $isa kernels: is -ffp-contract=fast the last word of their compile options?"
  exit 1
fi

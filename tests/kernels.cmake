# The kernels of tensor/ops are compiled once per instruction set. A function that two of them emit under one name would let the
# linker run the wrong one; and only the best set that a machine has is tested by default.
if(NOT REGATHER_SANITIZE)
  foreach(isa ${kernel_isas})
    add_test(NAME kernels.${isa}.symbols
             COMMAND bash "${CMAKE_CURRENT_SOURCE_DIR}/kernel_symbols.sh" ${isa} $<IF:$<OR:$<CONFIG:Debug>,$<STREQUAL:${isa},baseline>>,any,fused>
                     $<TARGET_OBJECTS:regather_kernels_${isa}>
             COMMAND_EXPAND_LISTS)
    set_tests_properties(kernels.${isa}.symbols PROPERTIES LABELS unit)
  endforeach()
endif()
set(tested_isas ${kernel_isas})
if(REGATHER_SANITIZE)  # the same loops
  set(tested_isas baseline)
endif()
foreach(isa ${tested_isas})
  add_test(NAME kernels.${isa}.operations COMMAND tensor_unit_tests --gtest_filter=*OpCases.equals*:*OpCases.gradients*:AdamW.*:Sgd.*:SumOfSquares.*:CountNonfinite.*)
  set_tests_properties(kernels.${isa}.operations PROPERTIES LABELS unit TIMEOUT 120 ENVIRONMENT "REGATHER_ISA=${isa};OMP_NUM_THREADS=1"
                       SKIP_REGULAR_EXPRESSION "REGATHER_ISA: \"[a-z0-9]+\" is not available here")
endforeach()

// The choice among the kernels of several instruction sets.
#pragma once

#include <stdint.h>

#include "flash.h"
#include "grouped_conv.h"
#include "kernels.h"
#include "rows.h"

namespace gacc {

// The kernels of instruction set number `isa`, or null after fail() if it is unknown or this CPU does not run it.
const Kernels* find_kernels(int32_t isa);
const FlashKernels* find_flash_kernels(int32_t isa);
const RowKernels* find_row_kernels(int32_t isa);
const GroupedConvKernels* find_grouped_conv_kernels(int32_t isa);

// The fastest instruction set that this CPU runs.
int32_t best_isa();

// Whether this CPU has instructions that multiply these without converting them to fp32 first.
bool cpu_multiplies_bf16();
bool cpu_multiplies_f16();

}  // namespace gacc

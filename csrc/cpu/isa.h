// The choice among the kernels of several instruction sets.
#pragma once

#include <stdint.h>

#include "kernels.h"

namespace gacc {

// The kernels of instruction set number `isa`, or null after fail() if it is unknown or this CPU does not run it.
const Kernels* find_kernels(int32_t isa);

}  // namespace gacc

#include "isa.h"

#include "error.h"
#include "gacc.h"

namespace {

using gacc::FlashKernels;
using gacc::Kernels;

bool always() { return true; }

#ifdef GACC_X86
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

struct Choice {
  const Kernels* kernels;
  const FlashKernels* flash;
  bool (*available)();
};

const Choice choices[] = {
    {&gacc::kernels_portable, &gacc::flash_portable, always},
#ifdef GACC_X86
    {&gacc::kernels_avx2, &gacc::flash_avx2, has_avx2},
    {&gacc::kernels_avx512, &gacc::flash_avx512, has_avx512},
#endif
};

constexpr int32_t num_choices = sizeof(choices) / sizeof(choices[0]);

bool known(int32_t isa) { return isa >= 0 && isa < num_choices; }

const Choice* find(int32_t isa) {
  if (!known(isa)) {
    gacc::fail("instruction set number %d is not in [0, %d)", isa, num_choices);
    return nullptr;
  }
  if (!choices[isa].available()) {
    gacc::fail("this CPU does not run the %s kernels", choices[isa].kernels->isa);
    return nullptr;
  }
  return &choices[isa];
}

}  // namespace

namespace gacc {

const Kernels* find_kernels(int32_t isa) {
  const Choice* choice = find(isa);
  return choice ? choice->kernels : nullptr;
}

const FlashKernels* find_flash_kernels(int32_t isa) {
  const Choice* choice = find(isa);
  return choice ? choice->flash : nullptr;
}

int32_t best_isa() {
  int32_t isa = num_choices - 1;
  while (!choices[isa].available()) --isa;
  return isa;
}

}  // namespace gacc

int32_t gacc_isa_count() { return num_choices; }

const char* gacc_isa_name(int32_t isa) { return known(isa) ? choices[isa].kernels->isa : nullptr; }

int32_t gacc_isa_available(int32_t isa) { return known(isa) && choices[isa].available(); }

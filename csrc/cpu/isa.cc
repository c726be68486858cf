#include "isa.h"

#include "error.h"
#include "gacc.h"

namespace {

using gacc::Kernels;

bool always() { return true; }

#ifdef GACC_X86
bool has_avx2() { return __builtin_cpu_supports("avx2"); }

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

struct Choice {
  const Kernels* kernels;
  bool (*available)();
};

const Choice choices[] = {
    {&gacc::kernels_portable, always},
#ifdef GACC_X86
    {&gacc::kernels_avx2, has_avx2},
    {&gacc::kernels_avx512, has_avx512},
#endif
};

constexpr int32_t num_choices = sizeof(choices) / sizeof(choices[0]);

bool known(int32_t isa) { return isa >= 0 && isa < num_choices; }

}  // namespace

namespace gacc {

const Kernels* find_kernels(int32_t isa) {
  if (!known(isa)) {
    fail("instruction set number %d is not in [0, %d)", isa, num_choices);
    return nullptr;
  }
  if (!choices[isa].available()) {
    fail("this CPU does not run the %s kernels", choices[isa].kernels->isa);
    return nullptr;
  }
  return choices[isa].kernels;
}

}  // namespace gacc

int32_t gacc_isa_count() { return num_choices; }

const char* gacc_isa_name(int32_t isa) { return known(isa) ? choices[isa].kernels->isa : nullptr; }

int32_t gacc_isa_available(int32_t isa) { return known(isa) && choices[isa].available(); }

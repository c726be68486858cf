#include "isa.h"

#ifdef GACC_X86
#include <cpuid.h>
#endif

#include "error.h"
#include "gacc.h"

namespace {

using gacc::FlashKernels;
using gacc::GroupedConvKernels;
using gacc::Kernels;
using gacc::RowKernels;

bool always() { return true; }

#ifdef GACC_X86
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

struct Features {  // of CPUID leaf 7, in Intel's names
  bool avx512_bf16 = false, avx512_fp16 = false, amx_bf16 = false, amx_fp16 = false;

  Features() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    avx512_fp16 = d >> 23 & 1, amx_bf16 = d >> 22 & 1;
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) avx512_bf16 = a >> 5 & 1, amx_fp16 = a >> 21 & 1;
  }
};

const Features& features() {
  static const Features found;
  return found;
}
#endif

struct Choice {
  const Kernels* kernels;
  const FlashKernels* flash;
  const RowKernels* rows;
  const GroupedConvKernels* grouped_conv;
  bool (*available)();
};

const Choice choices[] = {
    {&gacc::kernels_portable, &gacc::flash_portable, &gacc::rows_portable, &gacc::grouped_conv_portable, always},
#ifdef GACC_X86
    {&gacc::kernels_avx2, &gacc::flash_avx2, &gacc::rows_avx2, &gacc::grouped_conv_avx2, has_avx2},
    {&gacc::kernels_avx512, &gacc::flash_avx512, &gacc::rows_avx512, &gacc::grouped_conv_avx512, has_avx512},
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

const RowKernels* find_row_kernels(int32_t isa) {
  const Choice* choice = find(isa);
  return choice ? choice->rows : nullptr;
}

const GroupedConvKernels* find_grouped_conv_kernels(int32_t isa) {
  const Choice* choice = find(isa);
  return choice ? choice->grouped_conv : nullptr;
}

int32_t best_isa() {
  int32_t isa = num_choices - 1;
  while (!choices[isa].available()) --isa;
  return isa;
}

#ifdef GACC_X86
bool cpu_multiplies_bf16() { return has_avx512() && (features().avx512_bf16 || features().amx_bf16); }
bool cpu_multiplies_f16() { return has_avx512() && (features().avx512_fp16 || features().amx_fp16); }
#else
bool cpu_multiplies_bf16() { return false; }
bool cpu_multiplies_f16() { return false; }
#endif

}  // namespace gacc

int32_t gacc_isa_count() { return num_choices; }

const char* gacc_isa_name(int32_t isa) { return known(isa) ? choices[isa].kernels->isa : nullptr; }

int32_t gacc_isa_available(int32_t isa) { return known(isa) && choices[isa].available(); }

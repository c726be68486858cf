#include "error.h"
#include "gacc.h"
#include "isa.h"
#include "parallel.h"

int32_t gacc_traffic_probe(float* param, float* exp_avg, float* exp_avg_sq, const float* grad, int64_t numel, int32_t isa,
                           int32_t num_threads) {
  const gacc::Kernels* kernels = gacc::find_kernels(isa);
  if (!kernels || gacc::check_threads(num_threads)) return -1;
  if (!param || !exp_avg || !exp_avg_sq || !grad || numel < 0) return gacc::fail("a null array or numel < 0");
  return gacc::run_parallel(gacc::num_chunks(numel), num_threads, [=](int64_t chunk) {
    const int64_t at = chunk * gacc::chunk_numel;
    kernels->traffic({param + at, exp_avg + at, exp_avg_sq + at, grad + at, gacc::chunk_size(numel, at)});
  });
}

// The inner loops, compiled once per instruction set (see CMakeLists.txt).
#pragma once

#include <stdint.h>

namespace gacc {

// The constants of one tensor's update, in the kernels' precision.
struct AdamScalars {
  float sign;               // -1 to maximize
  float decay;              // the parameter's factor: 1 - lr * weight_decay, or 1
  float l2;                 // the parameter's weight in the gradient
  float grad_weight;        // 1 - beta1
  float beta2;
  float square_weight;      // 1 - beta2
  float inverse_root_correction;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float negative_step_size; // -lr / (1 - beta1^step)
};

// A piece of one tensor; the fields are those of gacc_adam_tensor.
struct AdamSlice {
  float* param;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;
  const void* grad;
  void* copy;
  int64_t numel;
  int32_t grad_dtype;
  int32_t copy_dtype;
};

struct TrafficSlice {
  float* param;
  float* exp_avg;
  float* exp_avg_sq;
  const float* grad;
  int64_t numel;
};

struct Kernels {
  const char* isa;
  void (*adam)(const AdamSlice&, const AdamScalars&);
  void (*traffic)(const TrafficSlice&);
};

extern const Kernels kernels_portable, kernels_avx2, kernels_avx512;

}  // namespace gacc

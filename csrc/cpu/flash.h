// FlashAttention: the work of one task, compiled once per instruction set (see CMakeLists.txt).
//
// Tri Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", arXiv 2205.14135, algorithms 1
// and 4, with the log-sum-exp as the only value that the forward saves (FlashAttention-2, arXiv 2307.08691).
#pragma once

#include <stdint.h>

#include "gacc.h"

namespace gacc {

constexpr int64_t query_tile = 128, key_tile = 96;  // queries and keys per tile of scores

static inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

struct FlashBackward {
  const void* grad;
  const void* out;
  const float* lse;
  void* grad_q;
  void* grad_k;
  void* grad_v;
  float* grad_bias;  // null, or zeros in the strides of the bias
};

// The keys and values of key/value heads [kv_begin, kv_end) in samples [batch_begin, batch_end): what one task owns.
struct FlashRange {
  int64_t batch_begin, batch_end, kv_begin, kv_end;
};

struct FlashKernels {
  // Writes tile `tile` of the queries of head `head` of sample `batch`.
  void (*forward)(const gacc_attention&, int64_t batch, int64_t head, int64_t tile, void* out, float* lse, float* scratch);
  void (*backward)(const gacc_attention&, const FlashBackward&, const FlashRange&, float* scratch);
};

// Floats of scratch memory that one call needs, aligned to 64 bytes.
int64_t flash_forward_scratch(const gacc_attention& attention);
int64_t flash_backward_scratch(const gacc_attention& attention);

extern const FlashKernels flash_portable, flash_avx2, flash_avx512;

}  // namespace gacc

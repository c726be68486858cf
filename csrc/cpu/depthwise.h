// Convolutions in which every channel has its own filter (depthwise), with channels last, and their gradients. Compiled once per instruction set.
//
// One relation between the finer image and the coarser one, along rows and along columns, is behind all of them:
//     fine = coarse * stride - padding + tap * dilation
#pragma once

#include <stdint.h>

namespace gacc {

// Along one dim: which elements of an image are read for which of another, with which tap of the filter.
struct Taps {
  const int32_t* begin;   // [num_targets + 1]: target t has the pairs [begin[t], begin[t + 1])
  const int32_t* source;  // of a pair: the element that is read
  const int32_t* tap;     // of a pair: the tap
  const uint8_t* shared;  // [num_targets]: whether this target and the next three have the same taps
};

// out[n, i, j, c] = the sum of in[n, p, q, c] * weight[a, b, c] over the pairs (p, a) of i and (q, b) of j.
struct Gather {
  const float* in;      // [batch, in_size[0], in_size[1], channels]
  const float* weight;  // [taps[0], taps[1], channels]
  float* out;           // [batch, out_size[0], out_size[1], channels]
  int64_t channels, in_size[2], out_size[2], num_taps[2];
  Taps rows, columns;
};

// weight[a, b, c] = the sum of coarse[n, i, j, c] * fine[n, p, q, c] over n and all (i, p), (j, q) that taps a and b tie.
struct Tie {
  const float* coarse;  // [batch, coarse_size[0], coarse_size[1], channels]
  const float* fine;    // [batch, fine_size[0], fine_size[1], channels]
  float* weight;
  int64_t batch, channels, coarse_size[2], fine_size[2], num_taps[2], stride[2], padding[2], dilation[2];
};

struct DepthwiseKernels {
  void (*gather)(const Gather&, int64_t begin, int64_t end);  // of the rows [begin, end) of batch * out_size[0]
  void (*tie)(const Tie&, int64_t row, int64_t begin, int64_t end);  // of one row of taps, channels [begin, end)
};

extern const DepthwiseKernels depthwise_portable, depthwise_avx2, depthwise_avx512;

}  // namespace gacc

// Convolutions whose channels are in groups, each with filters of its own, with channels last, and their gradients. Compiled once per instruction set.
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

// out[n, i, j, g, o] = the sum of in[n, p, q, g, k] * weight[a, b, g, k, o] over k and the pairs (p, a) of i and (q, b) of j.
struct Gather {
  const float* in;      // [batch, in_size[0], in_size[1], groups, depth]
  const float* weight;  // [taps[0], taps[1], groups, depth, width]
  float* out;           // [batch, out_size[0], out_size[1], groups, width]
  int64_t groups, depth, width, in_size[2], out_size[2], num_taps[2];
  Taps rows, columns;
};

// weight[a, b, g, k, o] = the sum of coarse[n, i, j, g, o] * fine[n, p, q, g, k] over n and all (i, p), (j, q) that taps a and b tie.
struct Tie {
  const float* coarse;  // [batch, coarse_size[0], coarse_size[1], groups, width]
  const float* fine;    // [batch, fine_size[0], fine_size[1], groups, depth]
  float* weight;
  int64_t batch, groups, depth, width, coarse_size[2], fine_size[2], num_taps[2], stride[2], padding[2], dilation[2];
};

struct GroupedConvKernels {
  void (*gather)(const Gather&, int64_t begin, int64_t end);  // of the rows [begin, end) of batch * out_size[0]
  void (*tie)(const Tie&, int64_t row, const int64_t groups[2], const int64_t depths[2]);  // of one row of taps, groups and depths [from, to)
};

extern const GroupedConvKernels grouped_conv_portable, grouped_conv_avx2, grouped_conv_avx512;

}  // namespace gacc

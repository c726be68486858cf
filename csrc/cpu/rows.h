// Largest elements of rows, and sums of exponentials: what a softmax or a cross-entropy needs of its logits. Compiled once per instruction set.
#pragma once

#include <stdint.h>

namespace gacc {

struct RowSums {
  const void* x;  // [num_rows, num_columns]
  int32_t dtype;
  int64_t num_rows, num_columns;
  float* largest;           // [num_rows], the largest element of each row, NaN where there is one; null: not wanted
  const float* subtracted;  // [num_rows], at least the largest element of each row; null: that itself
  float* sums;              // [num_rows], of exp(x - subtracted); null: not wanted
};

struct RowKernels {
  void (*sums)(const RowSums&, int64_t begin, int64_t end);  // of rows [begin, end)
};

extern const RowKernels rows_portable, rows_avx2, rows_avx512;

}  // namespace gacc

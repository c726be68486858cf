// Matrix products cut into pieces of one thread each. What multiplies a piece is a parameter: torch's kernels (torch_products.h), or a test's.
#pragma once

#include <stdint.h>

#include <vector>

namespace gacc {

// out[m, n] = a[m, k] . b[k, n]; the last stride of `out` is 1. Strides are in elements.
struct Piece {
  const void* a;
  const void* b;
  void* out;
  int64_t m, n, k;
  int64_t a_strides[2], b_strides[2], out_stride;
  int32_t dtype;  // gacc_dtype
};

// Whether it could multiply; called from several threads at once.
using Multiply = bool (*)(const Piece&);

int64_t byte_width(int32_t dtype);

// out[B, m, n] = a . b, with a [B, m, k] (or [B, k, m], transposed) and b [B, k, n] (or [B, n, k]), all dense.
struct Product {
  const void* a;
  const void* b;
  void* out;
  int64_t batch, m, n, k;
  bool a_transposed, b_transposed;
  int32_t dtype;
};
std::vector<Piece> cut_product(const Product& product, int64_t num_threads);

// Rows of groups: those of group g stand in [ends[g - 1], ends[g]) of num_rows rows. Ends that decrease or exceed num_rows are clamped.
struct Groups {
  const int32_t* ends;
  int64_t num_groups, num_rows;
};

// out[M, n] = rows[M, k] times the matrix [k, n] (or [n, k], transposed) of their group, dense. Rows beyond the last end are set to zero here.
std::vector<Piece> cut_grouped(const void* rows, const void* weight, void* out, const Groups& groups, int64_t n, int64_t k, bool transposed,
                               int32_t dtype, int64_t num_threads);

// out[G, m, n] = a[M, m] transposed times b[M, n], over the rows of each group. Matrices of groups without rows are set to zero here.
std::vector<Piece> cut_grouped_outer(const void* a, const void* b, void* out, const Groups& groups, int64_t m, int64_t n, int32_t dtype,
                                     int64_t num_threads);

}  // namespace gacc

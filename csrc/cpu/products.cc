#include "products.h"

#include <algorithm>
#include <cstring>

#include "gacc.h"

namespace gacc {
namespace {

constexpr int64_t multiple = 16;            // of rows and columns in a piece: whole vectors
constexpr double least_operations = 2e6;    // of a piece: tens of microseconds, against a few for the call
constexpr int64_t pieces_per_thread = 2;    // where groups are unequal, threads that are done early take more

const char* at(const void* data, int64_t index, int32_t dtype) { return static_cast<const char*>(data) + index * byte_width(dtype); }
char* at(void* data, int64_t index, int32_t dtype) { return static_cast<char*>(data) + index * byte_width(dtype); }

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Cuts one product along its longer side, so that little is packed twice, into at most `num_pieces`.
void cut(const Piece& whole, int64_t num_pieces, std::vector<Piece>& pieces) {
  const double operations = 2.0 * whole.m * whole.n * whole.k;
  num_pieces = std::clamp<int64_t>(static_cast<int64_t>(operations / least_operations), 1, std::max<int64_t>(num_pieces, 1));
  const bool by_rows = whole.m >= whole.n;
  const int64_t side = by_rows ? whole.m : whole.n, block = divide_up(divide_up(side, num_pieces), multiple) * multiple;
  for (int64_t start = 0; start < side; start += block) {
    Piece piece = whole;
    (by_rows ? piece.m : piece.n) = std::min(block, side - start);
    if (by_rows) {
      piece.a = at(whole.a, start * whole.a_strides[0], whole.dtype);
      piece.out = at(whole.out, start * whole.out_stride, whole.dtype);
    } else {
      piece.b = at(whole.b, start * whole.b_strides[1], whole.dtype);
      piece.out = at(whole.out, start, whole.dtype);
    }
    pieces.push_back(piece);
  }
}

Piece dense(const void* a, const void* b, void* out, int64_t m, int64_t n, int64_t k, bool a_transposed, bool b_transposed, int32_t dtype) {
  Piece piece{a, b, out, m, n, k, {k, 1}, {n, 1}, n, dtype};
  if (a_transposed) piece.a_strides[0] = 1, piece.a_strides[1] = m;
  if (b_transposed) piece.b_strides[0] = 1, piece.b_strides[1] = k;
  return piece;
}

// First row and number of rows of every group.
struct Rows {
  int64_t start, count;
};
std::vector<Rows> rows_of(const Groups& groups) {
  std::vector<Rows> found;
  int64_t start = 0;
  for (int64_t g = 0; g < groups.num_groups; ++g) {
    const int64_t end = std::clamp<int64_t>(groups.ends[g], start, groups.num_rows);
    found.push_back({start, end - start});
    start = end;
  }
  return found;
}

// How many pieces a group gets, of all of a product over `num_rows` rows.
int64_t share(int64_t count, int64_t num_rows, int64_t num_threads) { return divide_up(count * num_threads * pieces_per_thread, std::max<int64_t>(num_rows, 1)); }

// The largest first: whoever comes late has a small one.
void sort(std::vector<Piece>& pieces) {
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.m * a.n * a.k > b.m * b.n * b.k; });
}

}  // namespace

int64_t byte_width(int32_t dtype) { return dtype == GACC_F64 ? 8 : dtype == GACC_F32 ? 4 : 2; }

std::vector<Piece> cut_product(const Product& p, int64_t num_threads) {
  std::vector<Piece> pieces;
  if (p.batch * p.m * p.n == 0) return pieces;
  for (int64_t i = 0; i < p.batch; ++i) {
    const Piece whole = dense(at(p.a, i * p.m * p.k, p.dtype), at(p.b, i * p.k * p.n, p.dtype), at(p.out, i * p.m * p.n, p.dtype), p.m, p.n, p.k,
                              p.a_transposed, p.b_transposed, p.dtype);
    cut(whole, p.batch >= num_threads ? 1 : divide_up(num_threads, p.batch), pieces);
  }
  return pieces;
}

std::vector<Piece> cut_grouped(const void* rows, const void* weight, void* out, const Groups& groups, int64_t n, int64_t k, bool transposed,
                               int32_t dtype, int64_t num_threads) {
  std::vector<Piece> pieces;
  const std::vector<Rows> found = rows_of(groups);
  for (size_t g = 0; g < found.size() && n; ++g) {
    const auto [start, count] = found[g];
    if (!count) continue;
    const Piece whole = dense(at(rows, start * k, dtype), at(weight, static_cast<int64_t>(g) * k * n, dtype), at(out, start * n, dtype), count, n, k,
                              false, transposed, dtype);
    cut(whole, share(count, groups.num_rows, num_threads), pieces);
  }
  const int64_t end = found.empty() ? 0 : found.back().start + found.back().count;
  std::memset(at(out, end * n, dtype), 0, static_cast<size_t>((groups.num_rows - end) * n * byte_width(dtype)));
  sort(pieces);
  return pieces;
}

std::vector<Piece> cut_grouped_outer(const void* a, const void* b, void* out, const Groups& groups, int64_t m, int64_t n, int32_t dtype,
                                     int64_t num_threads) {
  std::vector<Piece> pieces;
  const std::vector<Rows> found = rows_of(groups);
  for (size_t g = 0; g < found.size() && m * n; ++g) {
    const auto [start, count] = found[g];
    char* result = at(out, static_cast<int64_t>(g) * m * n, dtype);
    if (!count) {
      std::memset(result, 0, static_cast<size_t>(m * n * byte_width(dtype)));
      continue;
    }
    const Piece whole = dense(at(a, start * m, dtype), at(b, start * n, dtype), result, m, n, count, true, false, dtype);
    cut(whole, share(count, groups.num_rows, num_threads), pieces);
  }
  sort(pieces);
  return pieces;
}

}  // namespace gacc

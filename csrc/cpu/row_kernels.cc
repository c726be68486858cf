// See rows.h. A row is read in blocks that stay in the first-level cache.
#pragma GCC diagnostic ignored "-Wunused-function"  // of flash_math.h, most of which is for attention

#include "rows.h"

#include "flash_math.h"
#include "gacc.h"

namespace {

constexpr int64_t block = 1024;
constexpr int num_sums = 4;  // hide the latency of additions, and keep their errors small

// Columns [begin, begin + count) of a row in fp32, with -inf up to a multiple of the vectors of one step.
int64_t read_block(const gacc::RowSums& at, int64_t row, int64_t begin, int64_t count, float* to) {
  read_row(at.x, at.dtype, row * at.num_columns + begin, count, count, to);
  const int64_t padded = round_up(count, num_sums * lanes);
  for (int64_t i = count; i < padded; ++i) to[i] = -infinity;
  return padded;
}

float largest_of(const gacc::RowSums& at, int64_t row, float* buffer) {
  Floats best = splat(-infinity);
  Ints unordered = {};
  for (int64_t begin = 0; begin < at.num_columns; begin += block) {
    const int64_t count = read_block(at, row, begin, smaller(block, at.num_columns - begin), buffer);
    for (int64_t i = 0; i < count; i += lanes) {
      const Floats x = load(buffer + i);
      best = larger(best, x);
      unordered |= x != x;
    }
  }
  float found = best[0];
  bool has_nan = unordered[0];
  for (int i = 1; i < lanes; ++i) {
    found = best[i] > found ? best[i] : found;
    has_nan |= unordered[i];
  }
  return has_nan ? __builtin_nanf("") : found;
}

float sum_of(const gacc::RowSums& at, int64_t row, float subtracted, float* buffer) {
  Floats sums[num_sums] = {};
  const Floats away = splat(subtracted);
  for (int64_t begin = 0; begin < at.num_columns; begin += block) {
    const int64_t count = read_block(at, row, begin, smaller(block, at.num_columns - begin), buffer);
    for (int64_t i = 0; i < count; i += num_sums * lanes) {
      for (int j = 0; j < num_sums; ++j) sums[j] += exponential(load(buffer + i + j * lanes) - away);
    }
  }
  const Floats all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float total = 0.0f;
  for (int i = 0; i < lanes; ++i) total += all[i];
  return total;
}

void sums(const gacc::RowSums& at, int64_t begin, int64_t end) {
  float buffer[block];
  for (int64_t row = begin; row < end; ++row) {
    float subtracted = at.subtracted ? at.subtracted[row] : 0.0f;
    if (at.largest) {
      const float found = at.largest[row] = largest_of(at, row, buffer);
      if (!at.subtracted) subtracted = found;
    }
    if (at.sums) at.sums[row] = sum_of(at, row, subtracted, buffer);
  }
}

}  // namespace

#define GACC_JOIN_(a, b) a##b
#define GACC_JOIN(a, b) GACC_JOIN_(a, b)

namespace gacc {
extern const RowKernels GACC_JOIN(rows_, GACC_ISA) = {sums};
}  // namespace gacc

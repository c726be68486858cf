// Vectors, products and elements for flash_kernels.cc, row_kernels.cc and grouped_conv_kernels.cc, once per instruction set: all of it in an unnamed namespace.
#pragma once

#include "flash.h"

namespace {

using gacc::key_tile;
using gacc::query_tile;
using gacc::round_up;

#if defined(__AVX512F__)
constexpr int lanes = 16, wide = 4;
#elif defined(__AVX2__)
constexpr int lanes = 8, wide = 2;
#else
constexpr int lanes = 4, wide = 2;
#endif
constexpr int rows = 6;  // of the register block of `multiply`, which is `wide` vectors wide: 12 sums hide the latency of additions
constexpr int64_t panel = wide * lanes;

typedef float Floats __attribute__((vector_size(lanes * 4)));
typedef int32_t Ints __attribute__((vector_size(lanes * 4)));
typedef uint32_t Words __attribute__((vector_size(lanes * 4)));
typedef float Unaligned __attribute__((vector_size(lanes * 4), aligned(4), may_alias));

constexpr float infinity = __builtin_inff();

inline int64_t smaller(int64_t a, int64_t b) { return b < a ? b : a; }

inline Floats load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, Floats value) { *reinterpret_cast<Unaligned*>(to) = value; }
inline Floats splat(float value) { return value - Floats{}; }  // x - 0 is x, but 0 + x is an addition, for the sake of -0
inline Floats larger(Floats a, Floats b) { return b > a ? b : a; }  // a NaN need not pass: exp(NaN - largest) is one

// Matrices

// Row-major, with `stride` elements from row to row.
struct Rows {
  const float* data;
  int64_t stride;
};

// Cut into panels of `panel` columns (the last may be narrower), each of them row-major and dense, so that a product walks through
// memory in one stream. `height` rows are allocated; `columns` is a multiple of 16.
struct Panels {
  float* data;
  int64_t height, columns;

  int64_t width(int64_t j) const { return smaller(panel, columns - j); }
  float* at(int64_t j) const { return data + j * height; }  // the panel that starts with column j
  float& operator()(int64_t i, int64_t j) const {
    const int64_t first = j / panel * panel;
    return at(first)[i * width(first) + j - first];
  }
};

// Products

// The left factor of a product: element (i, k) is data[i * stride + k], or data[k * stride + i] if it is transposed. The k are
// cut into chunks, `next` elements apart.
struct Left {
  const float* data;
  int64_t stride, chunk, next;

  Left(const Rows& matrix, int64_t depth) : data(matrix.data), stride(matrix.stride), chunk(depth), next(0) {}
  Left(const Panels& matrix, int64_t first) : data(matrix.at(first)), stride(panel), chunk(panel), next(matrix.height * panel) {}
};

template <int kRows, int kWide, bool kTransposed, bool kAdd>
inline void multiply_block(const Left& left, int64_t first_row, int64_t depth, const float* b, float* c) {
  constexpr int width = kWide * lanes;
  Floats sum[kRows][kWide];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kWide; ++j) sum[i][j] = kAdd ? load(c + i * width + j * lanes) : Floats{};
  }
  const float* chunk = left.data + first_row * (kTransposed ? 1 : left.stride);
  for (; depth > 0; depth -= left.chunk, chunk += left.next) {
    const float* a = chunk;
    for (int64_t k = smaller(depth, left.chunk); k > 0; --k, a += kTransposed ? left.stride : 1, b += width) {
      Floats right[kWide];
      for (int j = 0; j < kWide; ++j) right[j] = load(b + j * lanes);
      for (int i = 0; i < kRows; ++i) {
        const Floats factor = splat(a[i * (kTransposed ? 1 : left.stride)]);
        for (int j = 0; j < kWide; ++j) sum[i][j] += factor * right[j];
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kWide; ++j) store(c + i * width + j * lanes, sum[i][j]);
  }
}

// c[i][j] = or += sum over k < depth of left(i, k) * b[k][j], for i < m, a multiple of 6 or of 16, and the columns j of one panel.
template <int kWide, bool kTransposed, bool kAdd>
void multiply(int64_t m, const Left& left, int64_t depth, const float* b, float* c) {
  int64_t i = 0;
  for (; (m - i) % rows != 0; i += 4) multiply_block<4, kWide, kTransposed, kAdd>(left, i, depth, b, c + i * kWide * lanes);
  for (; i < m; i += rows) multiply_block<rows, kWide, kTransposed, kAdd>(left, i, depth, b, c + i * kWide * lanes);
}

// The first m rows of a product of matrices, c += a b, without the first `skipped` columns of a and rows of b: a multiple of `panel`.
void add_product(int64_t m, const Panels& a, int64_t skipped, const Panels& b, const Panels& c) {
  const Left left(a, skipped);
  const int64_t depth = a.columns - skipped;
  for (int64_t j = 0; j < c.columns; j += panel) {
    const int64_t width = c.width(j);
    const float* right = b.at(j) + skipped * width;
    switch (width / lanes) {
      case 1: multiply<1, false, true>(m, left, depth, right, c.at(j)); break;
      case 2: multiply<2, false, true>(m, left, depth, right, c.at(j)); break;
      case 3: multiply<3, false, true>(m, left, depth, right, c.at(j)); break;
      default: multiply<wide, false, true>(m, left, depth, right, c.at(j));
    }
  }
}

// exp(x) for x <= 0 (a little above from rounding), with 0 below -87.7, and NaN for NaN. The relative error is 2e-7, and that of
// rounding n * ln 2 where vectors have no fused multiply-add.
inline Floats exponential(Floats x) {
  const Floats magic = splat(12582912.0f + 127.0f);  // 1.5 * 2^23 + 127: adding it rounds to an integer, which stands, biased as an
  const Floats low = splat(-88.0f);                  // exponent, in the low bits; at `low` it is 0, and so is the power of two
  const Floats clamped = x < low ? low : x;
  const Floats shifted = clamped * 1.44269504088896341f + magic;
  const Floats n = shifted - magic;
  const Floats r = clamped - n * 0.693147180559945f;
  Floats p = r * 8.290272206e-03f + 4.189816117e-02f;
  p = p * r + 1.666763872e-01f;
  p = p * r + 4.999914765e-01f;
  p = p * r + 9.999997020e-01f;
  p = p * r + 1.0f;
  return p * reinterpret_cast<Floats>(reinterpret_cast<Ints>(shifted) << 23);
}

// Elements

inline float from_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float widen_bf16(uint16_t half) { return from_bits(static_cast<uint32_t>(half) << 16); }

inline uint16_t narrow_bf16(float value) {
  const uint32_t bits = to_bits(value);
  return static_cast<uint16_t>(value == value ? (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16 : 0x7fc0u);
}

inline float widen_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, rest = half & 0x7fffu;
  const float magnitude = from_bits(rest << 13) * 0x1p112f;  // shifts the exponent, and normalises subnormal numbers
  return from_bits(sign | (rest >= 0x7c00u ? 0x7f800000u | rest << 13 : to_bits(magnitude)));
}

// Round to nearest, ties to even.
inline uint16_t narrow_f16(float value) {
  const uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (rest < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    return static_cast<uint16_t>(sign | (to_bits(from_bits(rest) + 0.5f) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13));
}

// Row [0, size) of an array in fp32, with zeros up to `padded`.
void read_row(const void* array, int32_t dtype, int64_t offset, int64_t size, int64_t padded, float* to) {
  const uint16_t* half = static_cast<const uint16_t*>(array) + offset;
  if (dtype == GACC_F32) {
    const float* from = static_cast<const float*>(array) + offset;
    for (int64_t i = 0; i < size; ++i) to[i] = from[i];
  } else if (dtype == GACC_BF16) {
    for (int64_t i = 0; i < size; ++i) to[i] = widen_bf16(half[i]);
  } else {
    for (int64_t i = 0; i < size; ++i) to[i] = widen_f16(half[i]);
  }
  for (int64_t i = size; i < padded; ++i) to[i] = 0.0f;
}

void write_row(void* array, int32_t dtype, int64_t offset, int64_t size, const float* from) {
  uint16_t* half = static_cast<uint16_t*>(array) + offset;
  if (dtype == GACC_F32) {
    float* to = static_cast<float*>(array) + offset;
    for (int64_t i = 0; i < size; ++i) to[i] = from[i];
  } else if (dtype == GACC_BF16) {
    for (int64_t i = 0; i < size; ++i) half[i] = narrow_bf16(from[i]);
  } else {
    for (int64_t i = 0; i < size; ++i) half[i] = narrow_f16(from[i]);
  }
}

// `count` rows in fp32, padded to `padded` columns and to a multiple of 6 rows. `to` has room for them with 16 columns more: with a power
// of two as stride, a column's elements would compete for a few sets of the first-level cache.
Rows copy_rows(const void* array, int32_t dtype, int64_t offset, int64_t count, int64_t size, int64_t padded, float* to) {
  const int64_t stride = padded + 16;
  for (int64_t i = 0; i < count; ++i) read_row(array, dtype, offset + i * size, size, padded, to + i * stride);
  for (int64_t i = count * stride; i < round_up(count, rows) * stride; ++i) to[i] = 0.0f;
  return {to, stride};
}

// The same, but the array itself if it has that form.
Rows read_rows(const void* array, int32_t dtype, int64_t offset, int64_t count, int64_t size, int64_t padded, float* to) {
  if (dtype == GACC_F32 && size == padded && count % rows == 0) return {static_cast<const float*>(array) + offset, size};
  return copy_rows(array, dtype, offset, count, size, padded, to);
}

void scale(float* x, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

void fill(float* x, int64_t count, float value) {
  for (int64_t i = 0; i < count; ++i) x[i] = value;
}

// Rows as panels: [height][columns].
void pack(const Rows& from, const Panels& to) {
  for (int64_t j = 0; j < to.columns; j += panel) {
    const int64_t width = to.width(j);
    float* out = to.at(j);
    for (int64_t i = 0; i < to.height; ++i, out += width) {
      for (int64_t c = 0; c < width; c += lanes) store(out + c, load(from.data + i * from.stride + j + c));
    }
  }
}

// Rows as the columns of panels.
void pack_transposed(const Rows& from, const Panels& to) {
  for (int64_t j = 0; j < to.columns; j += panel) {
    const int64_t width = to.width(j);
    float* out = to.at(j);
    for (int64_t i = 0; i < to.height; ++i, out += width) {
      for (int64_t c = 0; c < width; ++c) out[c] = from.data[(j + c) * from.stride + i];
    }
  }
}

// Column j of panels, times a factor.
void unpack_column(const Panels& from, int64_t j, float factor, float* to) {
  const int64_t first = j / panel * panel, width = from.width(first);
  const float* column = from.at(first) + j - first;
  for (int64_t i = 0; i < from.height; ++i) to[i] = column[i * width] * factor;
}

// Row i of panels.
void unpack_row(const Panels& from, int64_t i, float* to) {
  for (int64_t j = 0; j < from.columns; j += panel) {
    const int64_t width = from.width(j);
    for (int64_t c = 0; c < width; c += lanes) store(to + j + c, load(from.at(j) + i * width + c));
  }
}

}  // namespace

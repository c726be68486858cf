// Vectors, products and elements for flash_kernels.cc, once per instruction set: all of it in an unnamed namespace.
#pragma once

#include "flash.h"

namespace {

using gacc::flash_tile;
using gacc::round_up;

#if defined(__AVX512F__)
constexpr int lanes = 16, wide = 4;
#elif defined(__AVX2__)
constexpr int lanes = 8, wide = 2;
#else
constexpr int lanes = 4, wide = 2;
#endif
constexpr int rows = 4;  // of the register block of `multiply`

typedef float Floats __attribute__((vector_size(lanes * 4)));
typedef int32_t Ints __attribute__((vector_size(lanes * 4)));
typedef uint32_t Words __attribute__((vector_size(lanes * 4)));
typedef float Unaligned __attribute__((vector_size(lanes * 4), aligned(4), may_alias));

constexpr float infinity = __builtin_inff();

inline Floats load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, Floats value) { *reinterpret_cast<Unaligned*>(to) = value; }
inline Floats splat(float value) { return Floats{} + value; }
inline Floats larger(Floats a, Floats b) { return b > a ? b : a; }  // a NaN need not pass: exp(NaN - largest) is one

// Products

template <int kWide, bool kAdd>
inline void multiply_block(int64_t depth, const float* a, int64_t row_stride, int64_t column_stride, const float* b, int64_t ldb,
                           float* c, int64_t ldc) {
  Floats sum[rows][kWide];
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < kWide; ++j) sum[i][j] = kAdd ? load(c + i * ldc + j * lanes) : Floats{};
  }
  for (int64_t k = 0; k < depth; ++k, a += column_stride, b += ldb) {
    Floats right[kWide];
    for (int j = 0; j < kWide; ++j) right[j] = load(b + j * lanes);
    for (int i = 0; i < rows; ++i) {
      const Floats left = splat(a[i * row_stride]);
      for (int j = 0; j < kWide; ++j) sum[i][j] += left * right[j];
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < kWide; ++j) store(c + i * ldc + j * lanes, sum[i][j]);
  }
}

// c[m][n] = or += sum over k of a[m * row_stride + k * column_stride] * b[k][n]; m a multiple of 4, n of 16.
template <bool kAdd>
void multiply(int64_t m, int64_t n, int64_t depth, const float* a, int64_t row_stride, int64_t column_stride, const float* b,
              int64_t ldb, float* c, int64_t ldc) {
  int64_t j = 0;
  for (; j + wide * lanes <= n; j += wide * lanes) {
    for (int64_t i = 0; i < m; i += rows) {
      multiply_block<wide, kAdd>(depth, a + i * row_stride, row_stride, column_stride, b + j, ldb, c + i * ldc + j, ldc);
    }
  }
  for (; j < n; j += lanes) {
    for (int64_t i = 0; i < m; i += rows) {
      multiply_block<1, kAdd>(depth, a + i * row_stride, row_stride, column_stride, b + j, ldb, c + i * ldc + j, ldc);
    }
  }
}

// exp(x) for x <= 0 (a little above from rounding), with 0 below -87.3, and NaN for NaN. Relative error 2e-7: Cephes' polynomial.
inline Floats exponential(Floats x) {
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which stands in the low bits
  const Floats low = splat(-87.3f);
  const Floats clamped = x < low ? low : x;
  const Floats shifted = clamped * 1.44269504088896341f + magic;
  const Floats n = shifted - magic;
  const Floats r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints power = (reinterpret_cast<Ints>(shifted) - 0x4b400000 + 127) << 23;
  return x < low ? Floats{} : p * reinterpret_cast<Floats>(power);
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

// `count` rows in fp32, padded to `padded` columns and to a multiple of 4 rows: the array itself if it has that form.
const float* read_rows(const void* array, int32_t dtype, int64_t offset, int64_t count, int64_t size, int64_t padded, float* to) {
  if (dtype == GACC_F32 && size == padded && count % rows == 0) return static_cast<const float*>(array) + offset;
  for (int64_t i = 0; i < count; ++i) read_row(array, dtype, offset + i * size, size, padded, to + i * padded);
  for (int64_t i = count * padded; i < round_up(count, rows) * padded; ++i) to[i] = 0.0f;
  return to;
}

void scale_rows(float* x, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

// [flash_tile][columns] -> [columns][flash_tile]; rows from `count` on become zeros.
void transpose(const float* from, int64_t count, int64_t columns, float* to) {
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < flash_tile; ++r) to[c * flash_tile + r] = r < count ? from[r * columns + c] : 0.0f;
  }
}

}  // namespace

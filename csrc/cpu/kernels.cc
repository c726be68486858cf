// Compiled several times, with GACC_ISA naming the instruction set. No C++ header is included and everything is in an
// unnamed namespace: an inline function shared with other files might be linked in its AVX-512 form for all of them.
#include "kernels.h"

#include "gacc.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

using gacc::AdamScalars;
using gacc::AdamSlice;
using gacc::TrafficSlice;

struct BFloat16 {
  uint16_t bits;
};
struct Nothing {};

constexpr int64_t block_numel = 512;  // of the buffer for copies: stays in the first-level cache

inline float load(const float* from, int64_t i) { return from[i]; }

inline float load(const BFloat16* from, int64_t i) {
  const uint32_t bits = static_cast<uint32_t>(from[i].bits) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

inline void store(Nothing*, int64_t, float) {}

inline void store(float* to, int64_t i, float value) { to[i] = value; }

// Round to nearest, ties to even; a NaN stays a NaN.
inline void store(BFloat16* to, int64_t i, float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to[i].bits = static_cast<uint16_t>(value == value ? rounded : 0x7fc0u);
}

// The operations and their order are those of torch's fused CPU AdamW (aten/src/ATen/native/cpu/FusedAdamKernel.cpp).
template <typename Grad, typename Copy, bool kL2, bool kAmsgrad>
void adam_loop(const AdamSlice& slice, const AdamScalars& scalars) {
  float* __restrict param = slice.param;
  float* __restrict exp_avg = slice.exp_avg;
  float* __restrict exp_avg_sq = slice.exp_avg_sq;
  float* __restrict max_exp_avg_sq = slice.max_exp_avg_sq;
  const Grad* __restrict grad = static_cast<const Grad*>(slice.grad);
  Copy* __restrict copy = static_cast<Copy*>(slice.copy);
  const AdamScalars s = scalars;
  const int64_t numel = slice.numel;
  // torch's lerp starts from the nearer end, for accuracy.
  const bool from_average = s.grad_weight < 0.5f;
  const float slope = from_average ? s.grad_weight : s.grad_weight - 1.0f;

  for (int64_t i = 0; i < numel; ++i) {
    float g = s.sign * load(grad, i);
    float p = param[i];
    if (kL2) {
      g = g + p * s.l2;
    } else {
      p = p * s.decay;
    }
    const float average = exp_avg[i];
    const float new_average = (from_average ? average : g) + slope * (g - average);
    const float square = exp_avg_sq[i] * s.beta2 + s.square_weight * g * g;
    float bound = square;
    if (kAmsgrad) {
      const float previous = max_exp_avg_sq[i];
      bound = previous > square ? previous : square;
      max_exp_avg_sq[i] = bound;
    }
    const float denominator = __builtin_sqrtf(bound) * s.inverse_root_correction + s.eps;
    p = p + s.negative_step_size * new_average / denominator;
    param[i] = p;
    exp_avg[i] = new_average;
    exp_avg_sq[i] = square;
    store(copy, i, p);
  }
}

// A copy is not read here, and going past the caches saves reading its lines from memory before they are overwritten.
template <typename Copy>
void write_past_caches(Copy* to, const Copy* from, int64_t numel) {
#ifdef __SSE2__
  constexpr int64_t step = sizeof(__m128i) / sizeof(Copy);
  if (reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0) {
    for (; numel >= step; numel -= step, to += step, from += step) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_load_si128(reinterpret_cast<const __m128i*>(from)));
    }
  }
#endif
  for (int64_t i = 0; i < numel; ++i) to[i] = from[i];
}

void finish_writes_past_caches() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

template <typename Grad, typename Copy, bool kL2, bool kAmsgrad>
void adam_blocks(const AdamSlice& slice, const AdamScalars& scalars) {
  if (!slice.copy) return adam_loop<Grad, Copy, kL2, kAmsgrad>(slice, scalars);
  alignas(64) Copy buffer[block_numel];
  AdamSlice block = slice;
  block.copy = buffer;
  for (int64_t begin = 0; begin < slice.numel; begin += block_numel) {
    const int64_t left = slice.numel - begin;
    block.numel = left < block_numel ? left : block_numel;
    block.param = slice.param + begin;
    block.exp_avg = slice.exp_avg + begin;
    block.exp_avg_sq = slice.exp_avg_sq + begin;
    if (kAmsgrad) block.max_exp_avg_sq = slice.max_exp_avg_sq + begin;
    block.grad = static_cast<const Grad*>(slice.grad) + begin;
    adam_loop<Grad, Copy, kL2, kAmsgrad>(block, scalars);
    write_past_caches(static_cast<Copy*>(slice.copy) + begin, buffer, block.numel);
  }
  finish_writes_past_caches();
}

template <typename Grad, typename Copy>
void adam_with_types(const AdamSlice& slice, const AdamScalars& scalars) {
  const bool l2 = scalars.l2 != 0.0f;
  if (slice.max_exp_avg_sq) {
    l2 ? adam_blocks<Grad, Copy, true, true>(slice, scalars) : adam_blocks<Grad, Copy, false, true>(slice, scalars);
  } else {
    l2 ? adam_blocks<Grad, Copy, true, false>(slice, scalars) : adam_blocks<Grad, Copy, false, false>(slice, scalars);
  }
}

template <typename Grad>
void adam_with_grad(const AdamSlice& slice, const AdamScalars& scalars) {
  switch (slice.copy_dtype) {
    case GACC_F32: return adam_with_types<Grad, float>(slice, scalars);
    case GACC_BF16: return adam_with_types<Grad, BFloat16>(slice, scalars);
    default: return adam_with_types<Grad, Nothing>(slice, scalars);
  }
}

void adam(const AdamSlice& slice, const AdamScalars& scalars) {
  slice.grad_dtype == GACC_BF16 ? adam_with_grad<BFloat16>(slice, scalars) : adam_with_grad<float>(slice, scalars);
}

void traffic(const TrafficSlice& slice) {
  float* __restrict param = slice.param;
  float* __restrict exp_avg = slice.exp_avg;
  float* __restrict exp_avg_sq = slice.exp_avg_sq;
  const float* __restrict grad = slice.grad;
  for (int64_t i = 0; i < slice.numel; ++i) {
    const float g = grad[i];
    param[i] += g;
    exp_avg[i] += g;
    exp_avg_sq[i] += g;
  }
}

}  // namespace

#define GACC_JOIN_(a, b) a##b
#define GACC_JOIN(a, b) GACC_JOIN_(a, b)
#define GACC_TEXT_(a) #a
#define GACC_TEXT(a) GACC_TEXT_(a)

namespace gacc {
extern const Kernels GACC_JOIN(kernels_, GACC_ISA) = {GACC_TEXT(GACC_ISA), adam, traffic};
}  // namespace gacc

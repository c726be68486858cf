// See grouped_conv.h. Channels stand behind one another, so a vector holds channels of one element, and all of them take the same taps. Where each has its
// own filter they are multiplied one by one, else elements of an image with vectors of weights.
#pragma GCC diagnostic ignored "-Wunused-function"  // of flash_math.h, most of which is for attention

#include "grouped_conv.h"

#include "flash_math.h"

namespace {

typedef float Four __attribute__((vector_size(16)));
typedef float UnalignedFour __attribute__((vector_size(16), aligned(4), may_alias));
#ifdef __AVX512F__
typedef float Eight __attribute__((vector_size(32)));
typedef float UnalignedEight __attribute__((vector_size(32), aligned(4), may_alias));
#endif

template <typename Vector>
struct Kind;
template <>
struct Kind<Floats> {
  static constexpr int width = lanes;
  static Floats read(const float* from) { return load(from); }
  static void write(float* to, Floats value) { store(to, value); }
};
struct Quad {};  // a name, as attributes of types are lost in arguments of templates
#ifdef __AVX512F__
struct Oct {};
template <>
struct Kind<Oct> {
  static constexpr int width = 8;
  static Eight read(const float* from) { return *reinterpret_cast<const UnalignedEight*>(from); }
  static void write(float* to, Eight value) { *reinterpret_cast<UnalignedEight*>(to) = value; }
};
#endif
template <>
struct Kind<Quad> {
  static constexpr int width = 4;
  static Four read(const float* from) { return *reinterpret_cast<const UnalignedFour*>(from); }
  static void write(float* to, Four value) { *reinterpret_cast<UnalignedFour*>(to) = value; }
};
template <>
struct Kind<float> {
  static constexpr int width = 1;
  static float read(const float* from) { return *from; }
  static void write(float* to, float value) { *to = value; }
};

#ifdef __AVX512F__  // which has twice as many registers
constexpr int most_wide = 4;
#else
constexpr int most_wide = 2;
#endif

// Calls f with the widest blocks of [begin, end) that fit, one after the other: f.run<Vector, kWide>(start).
template <typename Function>
inline void in_blocks(int64_t begin, int64_t end, const Function& f) {
  int64_t c = begin;
#ifdef __AVX512F__
  for (; end - c >= 4 * lanes; c += 4 * lanes) f.template run<Floats, 4>(c);
  for (; end - c >= 3 * lanes; c += 3 * lanes) f.template run<Floats, 3>(c);
#endif
  for (; end - c >= 2 * lanes; c += 2 * lanes) f.template run<Floats, 2>(c);
  for (; end - c >= lanes; c += lanes) f.template run<Floats, 1>(c);
#ifdef __AVX512F__
  if (end - c >= 8) f.template run<Oct, 1>(c), c += 8;
#endif
  if (end - c >= 4) f.template run<Quad, 1>(c), c += 4;
  for (; c < end; ++c) f.template run<float, 1>(c);
}

// Columns [j, j + kColumns) of a row, which have the same taps, so that a weight is read once for all of them. A vector holds channels that each
// have a filter of their own (kAlone), from `channel` on, or channels of the group `group` of the result.
template <typename Vector, int kWide, int kColumns, bool kAlone>
inline void gather_columns(const gacc::Gather& at, int64_t image, int64_t row, int64_t j, int64_t group, int64_t channel, float* to) {
  using K = Kind<Vector>;
  using Value = decltype(K::read(nullptr));
  Value sums[kColumns][kWide] = {};
  const int64_t depth = kAlone ? 1 : at.depth, pixel = at.groups * at.depth, step = at.groups * at.depth * at.width;
  const int64_t read = kAlone ? channel : group * at.depth, weighed = kAlone ? channel : group * at.depth * at.width + channel;
  const int32_t* first = at.columns.begin + j;
  const int32_t count = first[1] - first[0];
  for (int32_t r = at.rows.begin[row]; r < at.rows.begin[row + 1]; ++r) {
    const float* in = at.in + (image * at.in_size[0] + at.rows.source[r]) * at.in_size[1] * pixel + read;
    const float* weight = at.weight + at.rows.tap[r] * at.num_taps[1] * step + weighed;
    for (int32_t e = 0; e < count; ++e) {
      const float* factor = weight + at.columns.tap[first[0] + e] * step;
      const float* elements[kColumns];
      for (int c = 0; c < kColumns; ++c) elements[c] = in + at.columns.source[first[c] + e] * pixel;
      for (int64_t k = 0; k < depth; ++k, factor += at.width) {
        Value factors[kWide];
        for (int v = 0; v < kWide; ++v) factors[v] = K::read(factor + v * K::width);
        for (int c = 0; c < kColumns; ++c) {
          for (int v = 0; v < kWide; ++v) {
            if (kAlone) {
              sums[c][v] += K::read(elements[c] + v * K::width) * factors[v];
            } else {
              sums[c][v] += elements[c][k] * factors[v];
            }
          }
        }
      }
    }
  }
  const int64_t written = at.groups * at.width, offset = kAlone ? channel : group * at.width + channel;
  for (int c = 0; c < kColumns; ++c) {
    for (int v = 0; v < kWide; ++v) K::write(to + (j + c) * written + offset + v * K::width, sums[c][v]);
  }
}

template <bool kAlone>
struct GatherRow {
  const gacc::Gather& at;
  int64_t image, row, group;
  float* to;

  template <typename Vector, int kWide>
  void run(int64_t channel) const {
    constexpr int most = kWide == most_wide ? 6 : 8;  // sums enough to hide the latency of additions, and as many as there are registers
    const uint8_t* shared = at.columns.shared;
    for (int64_t j = 0; j < at.out_size[1];) {
      if (shared[j] && shared[j + 1] && shared[j + most - 4]) {
        gather_columns<Vector, kWide, most, kAlone>(at, image, row, j, group, channel, to);
        j += most;
      } else if (shared[j]) {
        gather_columns<Vector, kWide, 4, kAlone>(at, image, row, j, group, channel, to);
        j += 4;
      } else {
        gather_columns<Vector, kWide, 1, kAlone>(at, image, row, j, group, channel, to);
        j += 1;
      }
    }
  }
};

void gather(const gacc::Gather& at, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    float* to = at.out + i * at.out_size[1] * at.groups * at.width;
    const int64_t image = i / at.out_size[0], row = i % at.out_size[0];
    if (at.depth == 1 && at.width == 1) {
      in_blocks(0, at.groups, GatherRow<true>{at, image, row, 0, to});
    } else {
      for (int64_t group = 0; group < at.groups; ++group) in_blocks(0, at.width, GatherRow<false>{at, image, row, group, to});
    }
  }
}

inline int64_t divide_up(int64_t a, int64_t b) { return a > 0 ? (a + b - 1) / b : 0; }

// The gradients of one row of taps: of channels that have filters of their own, from `channel` on, or of the filters of one group from `channel` on, and
// kDepth of what they read from `from` on. Sums over a row of the image are added up by themselves, which keeps their errors small.
template <typename Vector, int kWide, int kDepth, bool kAlone>
void tie_row(const gacc::Tie& at, int64_t row, int64_t group, int64_t from, int64_t channel) {
  using K = Kind<Vector>;
  using Value = decltype(K::read(nullptr));
  constexpr int apart = kAlone ? (3 + kWide) / kWide : 1;  // sums that hide the latency of additions
  const int64_t coarse_pixel = at.groups * at.width, fine_pixel = at.groups * at.depth, step = at.groups * at.depth * at.width;
  const int64_t read = kAlone ? channel : group * at.width + channel, other = kAlone ? channel : group * at.depth + from;
  const int64_t written = kAlone ? channel : (group * at.depth + from) * at.width + channel;
  float* weight = at.weight + row * at.num_taps[1] * step + written;
  for (int64_t b = 0; b < at.num_taps[1]; ++b) {
    for (int k = 0; k < kDepth; ++k) {
      for (int v = 0; v < kWide; ++v) K::write(weight + b * step + k * at.width + v * K::width, Value{});
    }
  }
  for (int64_t n = 0; n < at.batch; ++n) {
    for (int64_t i = 0; i < at.coarse_size[0]; ++i) {
      const int64_t p = i * at.stride[0] - at.padding[0] + row * at.dilation[0];
      if (p < 0 || p >= at.fine_size[0]) continue;
      const float* coarse = at.coarse + (n * at.coarse_size[0] + i) * at.coarse_size[1] * coarse_pixel + read;
      const float* fine = at.fine + (n * at.fine_size[0] + p) * at.fine_size[1] * fine_pixel + other;
      for (int64_t b = 0; b < at.num_taps[1]; ++b) {
        const int64_t before = at.padding[1] - b * at.dilation[1];  // fine column of coarse column j: j * stride - before
        const int64_t last = smaller(at.coarse_size[1], divide_up(at.fine_size[1] + before, at.stride[1]));
        Value sums[apart][kDepth][kWide] = {};
        const auto add = [&](int64_t j, int u) {
          const float* x = coarse + j * coarse_pixel;
          const float* y = fine + (j * at.stride[1] - before) * fine_pixel;
          for (int v = 0; v < kWide; ++v) {
            const Value one = K::read(x + v * K::width);
            for (int k = 0; k < kDepth; ++k) {
              if (kAlone) {
                sums[u][k][v] += one * K::read(y + v * K::width);
              } else {
                sums[u][k][v] += one * y[k];
              }
            }
          }
        };
        int64_t j = divide_up(before, at.stride[1]);
        for (; j + apart <= last; j += apart) {
          for (int u = 0; u < apart; ++u) add(j + u, u);
        }
        for (; j < last; ++j) add(j, 0);
        for (int k = 0; k < kDepth; ++k) {
          for (int v = 0; v < kWide; ++v) {
            float* to = weight + b * step + k * at.width + v * K::width;
            Value sum = sums[0][k][v];
            for (int u = 1; u < apart; ++u) sum += sums[u][k][v];
            K::write(to, K::read(to) + sum);
          }
        }
      }
    }
  }
}

template <bool kAlone>
struct TieRow {
  const gacc::Tie& at;
  int64_t row, group, depth, end;

  template <typename Vector, int kWide>
  void run(int64_t channel) const {
    if (kAlone) {
      tie_row<Vector, kWide, 1, true>(at, row, 0, 0, channel);
      return;
    }
    constexpr int most = kWide > 2 ? 4 : 8;
    int64_t k = depth;
    for (; end - k >= most; k += most) tie_row<Vector, kWide, most, false>(at, row, group, k, channel);
    for (; end - k >= 4; k += 4) tie_row<Vector, kWide, 4, false>(at, row, group, k, channel);
    for (; k < end; ++k) tie_row<Vector, kWide, 1, false>(at, row, group, k, channel);
  }
};

void tie(const gacc::Tie& at, int64_t row, const int64_t groups[2], const int64_t depths[2]) {
  if (at.depth == 1 && at.width == 1) {
    in_blocks(groups[0], groups[1], TieRow<true>{at, row, 0, 0, 1});
  } else {
    for (int64_t g = groups[0]; g < groups[1]; ++g) in_blocks(0, at.width, TieRow<false>{at, row, g, depths[0], depths[1]});
  }
}

}  // namespace

#define GACC_JOIN_(a, b) a##b
#define GACC_JOIN(a, b) GACC_JOIN_(a, b)

namespace gacc {
extern const GroupedConvKernels GACC_JOIN(grouped_conv_, GACC_ISA) = {gather, tie};
}  // namespace gacc

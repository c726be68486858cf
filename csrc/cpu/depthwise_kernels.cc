// See depthwise.h. Channels stand behind one another, so a vector holds channels of one element, and all of them take the same taps.
#pragma GCC diagnostic ignored "-Wunused-function"  // of flash_math.h, most of which is for attention

#include "depthwise.h"

#include "flash_math.h"

namespace {

typedef float Four __attribute__((vector_size(16)));
typedef float UnalignedFour __attribute__((vector_size(16), aligned(4), may_alias));

template <typename Vector>
struct Kind;
template <>
struct Kind<Floats> {
  static constexpr int width = lanes;
  static Floats read(const float* from) { return load(from); }
  static void write(float* to, Floats value) { store(to, value); }
};
struct Quad {};
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

// Columns [j, j + kColumns) of a row, kWide vectors of channels; the columns have the same taps, so a weight is read once for all of them.
template <typename Vector, int kWide, int kColumns>
inline void gather_columns(const gacc::Gather& at, int64_t image, int64_t row, int64_t j, int64_t channel, float* to) {
  using K = Kind<Vector>;
  decltype(K::read(nullptr)) sums[kColumns][kWide] = {};
  const int64_t pixel = at.channels;
  const int32_t* first = at.columns.begin + j;
  const int32_t count = first[1] - first[0];
  for (int32_t r = at.rows.begin[row]; r < at.rows.begin[row + 1]; ++r) {
    const float* in = at.in + (image * at.in_size[0] + at.rows.source[r]) * at.in_size[1] * pixel + channel;
    const float* weight = at.weight + at.rows.tap[r] * at.num_taps[1] * pixel + channel;
    for (int32_t e = 0; e < count; ++e) {
      const float* factor = weight + at.columns.tap[first[0] + e] * pixel;
      decltype(K::read(nullptr)) factors[kWide];
      for (int v = 0; v < kWide; ++v) factors[v] = K::read(factor + v * K::width);
      for (int c = 0; c < kColumns; ++c) {
        const float* element = in + at.columns.source[first[c] + e] * pixel;
        for (int v = 0; v < kWide; ++v) sums[c][v] += K::read(element + v * K::width) * factors[v];
      }
    }
  }
  for (int c = 0; c < kColumns; ++c) {
    for (int v = 0; v < kWide; ++v) K::write(to + (j + c) * pixel + channel + v * K::width, sums[c][v]);
  }
}

template <typename Vector, int kWide>
void gather_row(const gacc::Gather& at, int64_t image, int64_t row, int64_t channel, float* to) {
  for (int64_t j = 0; j < at.out_size[1];) {
    if (at.columns.shared[j]) {
      gather_columns<Vector, kWide, 4>(at, image, row, j, channel, to);
      j += 4;
    } else {
      gather_columns<Vector, kWide, 1>(at, image, row, j, channel, to);
      j += 1;
    }
  }
}

// Calls f with the widest blocks of channels that fit, one after the other: f.run<Vector, kWide>(channel).
template <typename Function>
inline void in_blocks(int64_t begin, int64_t end, const Function& f) {
  int64_t c = begin;
  for (; end - c >= 4 * lanes; c += 4 * lanes) f.template run<Floats, 4>(c);
  for (; end - c >= 2 * lanes; c += 2 * lanes) f.template run<Floats, 2>(c);
  for (; end - c >= lanes; c += lanes) f.template run<Floats, 1>(c);
  for (; end - c >= 4; c += 4) f.template run<Quad, 1>(c);
  for (; c < end; ++c) f.template run<float, 1>(c);
}

struct GatherRow {
  const gacc::Gather& at;
  int64_t image, row;
  float* to;

  template <typename Vector, int kWide>
  void run(int64_t channel) const {
    gather_row<Vector, kWide>(at, image, row, channel, to);
  }
};

void gather(const gacc::Gather& at, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    float* to = at.out + i * at.out_size[1] * at.channels;
    in_blocks(0, at.channels, GatherRow{at, i / at.out_size[0], i % at.out_size[0], to});
  }
}

inline int64_t divide_up(int64_t a, int64_t b) { return a > 0 ? (a + b - 1) / b : 0; }

struct TieRow {
  const gacc::Tie& at;
  int64_t row;

  // Sums over a row of the image are added up by themselves, which keeps their errors small; kApart of them hide the latency of additions.
  template <typename Vector, int kWide>
  void run(int64_t channel) const {
    using K = Kind<Vector>;
    using Value = decltype(K::read(nullptr));
    constexpr int apart = 4 / kWide;
    const int64_t pixel = at.channels;
    float* weight = at.weight + row * at.num_taps[1] * pixel + channel;
    for (int64_t b = 0; b < at.num_taps[1]; ++b) {
      for (int v = 0; v < kWide; ++v) K::write(weight + b * pixel + v * K::width, Value{});
    }
    for (int64_t n = 0; n < at.batch; ++n) {
      for (int64_t i = 0; i < at.coarse_size[0]; ++i) {
        const int64_t p = i * at.stride[0] - at.padding[0] + row * at.dilation[0];
        if (p < 0 || p >= at.fine_size[0]) continue;
        const float* coarse = at.coarse + (n * at.coarse_size[0] + i) * at.coarse_size[1] * pixel + channel;
        const float* fine = at.fine + (n * at.fine_size[0] + p) * at.fine_size[1] * pixel + channel;
        for (int64_t b = 0; b < at.num_taps[1]; ++b) {
          const int64_t before = at.padding[1] - b * at.dilation[1];  // fine column of coarse column j: j * stride - before
          const int64_t first = divide_up(before, at.stride[1]);
          const int64_t last = smaller(at.coarse_size[1], divide_up(at.fine_size[1] + before, at.stride[1]));
          Value sums[apart][kWide] = {};
          int64_t j = first;
          for (; j + apart <= last; j += apart) {
            for (int u = 0; u < apart; ++u) {
              const float* one = coarse + (j + u) * pixel;
              const float* other = fine + ((j + u) * at.stride[1] - before) * pixel;
              for (int v = 0; v < kWide; ++v) sums[u][v] += K::read(one + v * K::width) * K::read(other + v * K::width);
            }
          }
          for (; j < last; ++j) {
            const float* one = coarse + j * pixel;
            const float* other = fine + (j * at.stride[1] - before) * pixel;
            for (int v = 0; v < kWide; ++v) sums[0][v] += K::read(one + v * K::width) * K::read(other + v * K::width);
          }
          float* to = weight + b * pixel;
          for (int v = 0; v < kWide; ++v) {
            Value sum = sums[0][v];
            for (int u = 1; u < apart; ++u) sum += sums[u][v];
            K::write(to + v * K::width, K::read(to + v * K::width) + sum);
          }
        }
      }
    }
  }
};

void tie(const gacc::Tie& at, int64_t row, int64_t begin, int64_t end) { in_blocks(begin, end, TieRow{at, row}); }

}  // namespace

#define GACC_JOIN_(a, b) a##b
#define GACC_JOIN(a, b) GACC_JOIN_(a, b)

namespace gacc {
extern const DepthwiseKernels GACC_JOIN(depthwise_, GACC_ISA) = {gather, tie};
}  // namespace gacc

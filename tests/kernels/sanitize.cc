// Runs the attention, Adam, row and convolution kernels over odd shapes, from several threads at once, products in pieces, streams, and minimum cuts; built by
// tests/sanitizers.sh.
// Arrays are allocated to the byte, so that AddressSanitizer sees every read or write beyond them.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "grouped_conv_pairs.h"
#include "gacc.h"
#include "isa.h"
#include "order.h"
#include "products.h"
#include "tasks.h"

namespace {

struct Shape {
  int64_t batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim, left, right;
};

const Shape shapes[] = {{1, 1, 1, 1, 1, 1, 1, -1, -1},     {2, 4, 2, 70, 101, 40, 24, -1, -1}, {1, 2, 1, 64, 128, 64, 64, -1, 0},
                        {2, 2, 2, 65, 63, 33, 47, 5, 0},   {1, 2, 2, 130, 3, 17, 128, -1, 0},  {1, 1, 1, 3, 130, 256, 16, 0, 70},
                        {2, 2, 1, 129, 129, 16, 32, 20, 3}, {1, 2, 2, 5, 0, 32, 32, -1, -1},    {0, 2, 2, 5, 5, 32, 32, -1, -1},
                        {1, 1, 1, 130, 70, 256, 16, -1, -1}, {1, 1, 1, 130, 300, 16, 256, -1, 0}};

uint32_t state = 1;

float random_number() {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
}

// Elements of a dtype in an array of their exact size; bf16 and fp16 get bits that are no NaN in either.
std::vector<char> array(int64_t numel, int32_t dtype) {
  std::vector<char> bytes(numel * (dtype == GACC_F32 ? 4 : 2));
  for (int64_t i = 0; i < numel; ++i) {
    const float value = random_number();
    if (dtype == GACC_F32) {
      reinterpret_cast<float*>(bytes.data())[i] = value;
    } else {
      reinterpret_cast<uint16_t*>(bytes.data())[i] = static_cast<uint16_t>(0x3800 + static_cast<int>(value * 500.0f));
    }
  }
  bytes.shrink_to_fit();
  return bytes;
}

void require(int32_t status) {
  if (status == 0) return;
  std::fprintf(stderr, "%s\n", gacc_last_error());
  std::abort();
}

void attention(const Shape& shape, int32_t dtype, int32_t isa, int options, int32_t threads) {
  const int64_t rows = shape.batch * shape.heads * shape.q_len, kv_rows = shape.batch * shape.kv_heads * shape.kv_len;
  const auto q = array(rows * shape.head_dim, dtype), k = array(kv_rows * shape.head_dim, dtype);
  const auto v = array(kv_rows * shape.value_dim, dtype), grad = array(rows * shape.value_dim, dtype);
  auto out = array(rows * shape.value_dim, dtype), grad_q = q, grad_k = k, grad_v = v;
  const auto bias = array(shape.heads * shape.q_len * shape.kv_len, GACC_F32);
  auto grad_bias = bias;
  std::vector<float> lse(rows);
  std::vector<int32_t> q_segments(shape.batch * shape.q_len), kv_segments(shape.batch * shape.kv_len);
  for (size_t i = 0; i < q_segments.size(); ++i) q_segments[i] = i % 3;
  for (size_t i = 0; i < kv_segments.size(); ++i) kv_segments[i] = i % 2;

  gacc_attention at{};
  at.q = q.data(), at.k = k.data(), at.v = v.data();
  at.batch = shape.batch, at.heads = shape.heads, at.kv_heads = shape.kv_heads;
  at.q_len = shape.q_len, at.kv_len = shape.kv_len, at.head_dim = shape.head_dim, at.value_dim = shape.value_dim;
  at.left = shape.left, at.right = shape.right;
  at.dtype = dtype;
  at.scale = 0.3f;
  if (options & 1) {
    at.bias = reinterpret_cast<const float*>(bias.data());
    at.bias_strides[1] = shape.q_len * shape.kv_len, at.bias_strides[2] = shape.kv_len, at.bias_strides[3] = 1;
  }
  if (options & 2) {
    at.q_segments = q_segments.data(), at.kv_segments = kv_segments.data();
    at.empty_rows = GACC_UNIFORM;
  }
  if (options & 4) {
    at.dropout = 0.3f, at.key[0] = 7, at.key[1] = 8;
    const int64_t size[4] = {shape.batch, shape.heads, shape.q_len, shape.kv_len};
    for (int i = 0; i < 4; ++i) at.global_size[i] = size[i];
  }
  float* to_bias = options & 1 ? reinterpret_cast<float*>(grad_bias.data()) : nullptr;
  require(gacc_flash_forward(&at, out.data(), lse.data(), isa, threads));
  require(gacc_flash_backward(&at, grad.data(), out.data(), lse.data(), grad_q.data(), grad_k.data(), grad_v.data(), to_bias, isa,
                              threads));
}

void adam(int32_t isa, int32_t threads) {
  std::vector<float> param(300001, 1.0f), exp_avg(param), exp_avg_sq(param), grad(param);
  gacc_adam_tensor tensor{param.data(), exp_avg.data(), exp_avg_sq.data(), nullptr, grad.data(), nullptr,
                          static_cast<int64_t>(param.size()), 1, 0, GACC_F32, GACC_NONE};
  gacc_adam_group group{1e-3, 0.9, 0.99, 1e-8, 0.0, 1, 0};
  require(gacc_adam_step(&tensor, 1, &group, 1, isa, threads));
}

// Snappy blocks of random bytes, which are damaged in every way, and hashes of every length. Returns how many blocks were whole.
// Every form of the kernel: largest and sums, the largest alone, sums above a given number.
void rows(int32_t isa) {
  const gacc::RowKernels* kernels = gacc::find_row_kernels(isa);
  for (const int64_t columns : {1, 7, 16, 33, 257}) {
    for (int32_t dtype = GACC_F32; dtype < GACC_F32 + 3; ++dtype) {
      constexpr int64_t count = 5;
      const auto x = array(count * columns, dtype);
      std::vector<float> largest(count), sums(count), again(count);
      std::vector<std::thread> threads;
      for (int64_t begin = 0; begin < count; begin += 2) {
        threads.emplace_back([&, begin] {
          const int64_t end = std::min(count, begin + 2);
          kernels->sums({x.data(), dtype, count, columns, largest.data(), nullptr, sums.data()}, begin, end);
          kernels->sums({x.data(), dtype, count, columns, largest.data(), nullptr, nullptr}, begin, end);
          kernels->sums({x.data(), dtype, count, columns, nullptr, largest.data(), again.data()}, begin, end);
        });
      }
      for (std::thread& thread : threads) thread.join();
      for (int64_t row = 0; row < count; ++row) {
        if (!(sums[row] >= 0.999f && sums[row] <= columns * 1.001f && std::fabs(sums[row] - again[row]) <= 1e-4f * sums[row])) {
          std::fprintf(stderr, "row %lld of %lld columns: %f, %f\n", static_cast<long long>(row), static_cast<long long>(columns), sums[row], again[row]);
          std::abort();
        }
      }
    }
  }
}

void check(const std::vector<float>& got, const std::vector<float>& want, const char* what) {
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::fabs(got[i] - want[i]) <= 1e-4f * (1.0f + std::fabs(want[i]))) continue;
    std::fprintf(stderr, "%s, element %zu: %f instead of %f\n", what, i, got[i], want[i]);
    std::abort();
  }
}

std::vector<float> floats(int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = random_number();
  return values;
}

// A convolution in groups and both gradients against plain loops, in two parts at once.
void grouped_convolutions(int32_t isa) {
  const gacc::GroupedConvKernels* kernels = gacc::find_grouped_conv_kernels(isa);
  struct Case {
    int64_t groups, depth, width, height, columns, taps[2], stride[2], padding[2], dilation[2];
  };
  const Case cases[] = {{4, 1, 1, 5, 9, {3, 3}, {1, 1}, {1, 1}, {1, 1}},    {21, 1, 1, 6, 11, {3, 5}, {2, 2}, {1, 2}, {1, 1}},
                        {64, 1, 1, 1, 13, {1, 4}, {1, 1}, {0, 3}, {1, 1}},  {100, 1, 1, 4, 4, {7, 7}, {1, 1}, {3, 3}, {1, 1}},
                        {39, 1, 1, 9, 10, {3, 3}, {2, 3}, {2, 0}, {2, 3}},  {5, 1, 1, 3, 3, {1, 1}, {2, 2}, {0, 0}, {1, 1}},
                        {3, 4, 8, 5, 20, {3, 3}, {1, 1}, {1, 1}, {1, 1}},   {2, 13, 21, 6, 7, {3, 2}, {2, 1}, {1, 1}, {1, 2}},
                        {2, 1, 3, 4, 5, {3, 3}, {1, 1}, {1, 1}, {1, 1}},    {1, 70, 67, 3, 12, {1, 3}, {1, 1}, {0, 1}, {1, 1}}};
  constexpr int64_t batch = 2;
  for (const Case& c : cases) {
    const auto size = [&](int64_t fine, int d) { return (fine + 2 * c.padding[d] - c.dilation[d] * (c.taps[d] - 1) - 1) / c.stride[d] + 1; };
    const int64_t rows = size(c.height, 0), columns = size(c.columns, 1), in = c.groups * c.depth, out = c.groups * c.width;
    const auto fine = floats(batch * c.height * c.columns * in), coarse = floats(batch * rows * columns * out);
    const auto weight = floats(c.taps[0] * c.taps[1] * in * c.width);
    std::vector<float> swapped(weight.size());  // depth and width the other way round, for the way back
    std::vector<float> down(coarse.size()), up(fine.size()), tied(weight.size()), want_down(coarse.size()), want_up(fine.size()), want_tied(weight.size());
    for (int64_t n = 0; n < batch; ++n) for (int64_t i = 0; i < rows; ++i) for (int64_t j = 0; j < columns; ++j)
      for (int64_t a = 0; a < c.taps[0]; ++a) for (int64_t b = 0; b < c.taps[1]; ++b) {
        const int64_t p = i * c.stride[0] - c.padding[0] + a * c.dilation[0], q = j * c.stride[1] - c.padding[1] + b * c.dilation[1];
        for (int64_t g = 0; g < c.groups; ++g) for (int64_t k = 0; k < c.depth; ++k) for (int64_t o = 0; o < c.width; ++o) {
          const int64_t group = (a * c.taps[1] + b) * c.groups + g;
          const size_t tap = (group * c.depth + k) * c.width + o;
          swapped[(group * c.width + o) * c.depth + k] = weight[tap];
          if (p < 0 || q < 0 || p >= c.height || q >= c.columns) continue;
          const size_t one = ((n * rows + i) * columns + j) * out + g * c.width + o, other = ((n * c.height + p) * c.columns + q) * in + g * c.depth + k;
          want_down[one] += fine[other] * weight[tap], want_up[other] += coarse[one] * weight[tap], want_tied[tap] += coarse[one] * fine[other];
        }
      }
    const auto pairs = [&](int64_t targets, int64_t sources, int d, bool coarse_targets) {
      return gacc::Pairs(targets, sources, c.taps[d], c.stride[d], c.padding[d], c.dilation[d], coarse_targets);
    };
    const gacc::Pairs of_rows = pairs(rows, c.height, 0, true), of_columns = pairs(columns, c.columns, 1, true);
    const gacc::Pairs back_rows = pairs(c.height, rows, 0, false), back_columns = pairs(c.columns, columns, 1, false);
    const gacc::Gather forward{fine.data(), weight.data(), down.data(), c.groups, c.depth, c.width, {c.height, c.columns}, {rows, columns},
                               {c.taps[0], c.taps[1]}, of_rows.taps(), of_columns.taps()};
    const gacc::Gather back{coarse.data(), swapped.data(), up.data(), c.groups, c.width, c.depth, {rows, columns}, {c.height, c.columns},
                            {c.taps[0], c.taps[1]}, back_rows.taps(), back_columns.taps()};
    const gacc::Tie tie{coarse.data(), fine.data(), tied.data(), batch, c.groups, c.depth, c.width, {rows, columns}, {c.height, c.columns},
                        {c.taps[0], c.taps[1]}, {c.stride[0], c.stride[1]}, {c.padding[0], c.padding[1]}, {c.dilation[0], c.dilation[1]}};
    std::vector<std::thread> threads;
    for (int half = 0; half < 2; ++half) {
      threads.emplace_back([&, half] {
        kernels->gather(forward, half * rows, (half + 1) * rows);
        kernels->gather(back, half * c.height, (half + 1) * c.height);
        const int64_t groups[2] = {half ? c.groups / 2 : 0, half ? c.groups : c.groups / 2}, depths[3] = {0, c.depth / 2, c.depth};
        for (int64_t row = 0; row < c.taps[0]; ++row) {
          for (int part = c.depth == 1; part < 2; ++part) kernels->tie(tie, row, groups, depths + part);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    check(down, want_down, "a convolution in groups"), check(up, want_up, "the gradient of its input"), check(tied, want_tied, "the gradient of its filters");
  }
}

int records() {
  int num_whole = 0;
  const uint64_t key[4] = {1, 2, 3, 4};
  for (int64_t size = 0; size < 4000; ++size) {
    std::vector<uint8_t> data(static_cast<size_t>(size % 100));
    for (uint8_t& byte : data) {
      byte = static_cast<uint8_t>(std::fabs(random_number()) * (size % 3 ? 256 : 24));
    }
    std::vector<uint8_t> out(static_cast<size_t>(size % 7));
    num_whole += gacc_snappy_decompress(data.data(), size % 100, out.data(), size % 7) == 0;
    uint64_t hash;
    require(gacc_highway_hash64(key, data.data(), size % 100, &hash));
  }
  return num_whole;
}

// Minimum cuts of random networks: with and without limits and the source's side.
void cuts() {
  const auto below = [](int64_t limit) { return static_cast<int32_t>(std::fabs(random_number()) * 1000) % static_cast<int32_t>(limit); };
  for (int repeat = 0; repeat < 2000; ++repeat) {
    const int64_t operators = 1 + below(40), nodes = 2 + operators + below(10), arcs = below(200);
    std::vector<int32_t> tails, heads;
    std::vector<int64_t> sizes;
    for (int64_t a = 0; a < arcs; ++a) {
      tails.push_back(below(nodes));
      heads.push_back(below(nodes));
      sizes.push_back(below(100));
    }
    const gacc_flow_network network{nodes, operators, arcs, tails.data(), heads.data(), sizes.data()};
    std::vector<uint8_t> inside(static_cast<size_t>((operators + 7) / 8)), outside(inside), side(inside);
    for (int64_t v = 0; v < operators; ++v)
      if (const int32_t kind = below(3)) (kind == 1 ? inside : outside)[v >> 3] |= 1 << (v & 7);
    int64_t value;
    require(gacc_min_cut(&network, inside.data(), outside.data(), repeat % 2 ? INT64_MAX : below(100), &value,
                         repeat % 3 ? side.data() : nullptr));
  }
}

// Multiplies a piece as torch's kernels do, which are not here.
bool multiply(const gacc::Piece& p) {
  const float *a = static_cast<const float*>(p.a), *b = static_cast<const float*>(p.b);
  float* out = static_cast<float*>(p.out);
  for (int64_t i = 0; i < p.m; ++i) {
    for (int64_t j = 0; j < p.n; ++j) {
      float sum = 0;
      for (int64_t l = 0; l < p.k; ++l) sum += a[i * p.a_strides[0] + l * p.a_strides[1]] * b[l * p.b_strides[0] + j * p.b_strides[1]];
      out[i * p.out_stride + j] = sum;
    }
  }
  return true;
}

// An array of floats to the byte, so that a read or write beyond it is seen.
struct Floats {
  int64_t numel;
  std::unique_ptr<float[]> data;
  explicit Floats(int64_t numel) : numel(numel), data(new float[static_cast<size_t>(numel)]) {
    for (int64_t i = 0; i < numel; ++i) data[static_cast<size_t>(i)] = random_number();
  }
};

void expect_equal(const Floats& got, const std::vector<float>& expected) {
  for (int64_t i = 0; i < got.numel; ++i) {
    if (got.data[static_cast<size_t>(i)] == expected[static_cast<size_t>(i)]) continue;
    std::fprintf(stderr, "element %lld of a product is wrong\n", static_cast<long long>(i));
    std::abort();
  }
}

// The pieces on helpers of which some come early, some late and some after everything is done.
void run_pieces(const std::vector<gacc::Piece>& pieces) {
  std::vector<std::thread> helpers;
  const auto schedule = [&](auto helper) { helpers.emplace_back(helper); };
  const bool good = gacc::run_tasks(static_cast<int64_t>(pieces.size()), 4, schedule, [&](int64_t i) { return multiply(pieces[static_cast<size_t>(i)]); });
  if (!good) std::abort();
  for (std::thread& helper : helpers) helper.join();
}

void products() {
  const auto at = [](const Floats& x, int64_t i) { return x.data[static_cast<size_t>(i)]; };
  for (int form = 0; form < 4; ++form) {
    const bool ta = form & 1, tb = form & 2;
    const int64_t batch = 1 + form, m = 37 + 90 * form, n = 130, k = 97;
    const Floats a(batch * m * k), b(batch * k * n), out(batch * m * n);
    run_pieces(gacc::cut_product({a.data.get(), b.data.get(), out.data.get(), batch, m, n, k, ta, tb, GACC_F32}, 4));
    std::vector<float> expected(static_cast<size_t>(batch * m * n));
    for (int64_t i = 0; i < batch * m * n; ++i) {
      const int64_t s = i / (m * n), row = i / n % m, column = i % n;
      for (int64_t l = 0; l < k; ++l) {
        expected[static_cast<size_t>(i)] += at(a, s * m * k + (ta ? l * m + row : row * k + l)) * at(b, s * k * n + (tb ? column * k + l : l * n + column));
      }
    }
    expect_equal(out, expected);
  }
  // Groups: empty, one that holds most rows, rows of none, ends that decrease or point beyond the rows.
  const std::vector<std::vector<int32_t>> all_ends = {{0, 3, 3, 190, 200}, {200, 0, -5, 200, 200}, {50, 9999, 60, 70, 80}, {}};
  for (const std::vector<int32_t>& ends : all_ends) {
    const int64_t num_groups = static_cast<int64_t>(ends.size()), rows = 211, k = 65, n = 84;
    const gacc::Groups groups{ends.data(), num_groups, rows};
    const Floats x(rows * k), weight(num_groups * k * n), grad(rows * n), out(rows * n), outer(num_groups * k * n);
    std::vector<float> expected(static_cast<size_t>(rows * n)), expected_outer(static_cast<size_t>(num_groups * k * n));
    int64_t start = 0;
    for (int64_t g = 0; g < num_groups; ++g) {
      const int64_t end = std::min<int64_t>(std::max<int64_t>(ends[static_cast<size_t>(g)], start), rows);
      for (; start < end; ++start) {
        for (int64_t j = 0; j < n; ++j) {
          for (int64_t l = 0; l < k; ++l) {
            expected[static_cast<size_t>(start * n + j)] += at(x, start * k + l) * at(weight, (g * n + j) * k + l);
            expected_outer[static_cast<size_t>((g * k + l) * n + j)] += at(x, start * k + l) * at(grad, start * n + j);
          }
        }
      }
    }
    run_pieces(gacc::cut_grouped(x.data.get(), weight.data.get(), out.data.get(), groups, n, k, true, GACC_F32, 4));
    expect_equal(out, expected);
    run_pieces(gacc::cut_grouped_outer(x.data.get(), grad.data.get(), outer.data.get(), groups, k, n, GACC_F32, 4));
    expect_equal(outer, expected_outer);
  }
}

// Four devices send while one thread takes what has arrived; the stream is closed while they may still be sending.
void streams() {
  for (int64_t taken : {40, 7}) {
    const int64_t devices = 4, slots = 10, numel = 1000;
    std::vector<float> received(devices * slots * numel), sent(numel, 1.0f);
    std::vector<void*> destinations;
    for (int64_t i = 0; i < devices * slots; ++i) destinations.push_back(received.data() + i * numel);
    const std::vector<int64_t> sizes(devices * slots, numel * 4);
    int64_t id = 0, count = 0, places[3];
    double when[3];
    require(gacc_stream_open(destinations.data(), sizes.data(), devices, slots, &id));
    std::vector<std::thread> threads;
    for (int64_t device = 0; device < devices; ++device) {
      threads.emplace_back([&, device] {
        for (int64_t slot = 0; slot < slots; ++slot) require(gacc_stream_send(id, device, slot, sent.data(), numel * 4));
      });
    }
    for (int64_t seen = 0; seen < taken; seen += count) {
      require(gacc_stream_wait(id, 10.0, 3, places, when, &count));
      for (int64_t i = 0; i < count; ++i) received[places[i] * numel] += 1;
    }
    require(gacc_stream_close(id));
    for (float& value : received) value = 0;
    for (std::thread& thread : threads) thread.join();
    for (float value : received) {
      if (value != 0) std::abort();  // it was closed
    }
  }
}

}  // namespace

int main() {
  int64_t calls = 0;
  for (int32_t isa = 0; isa < gacc_isa_count(); ++isa) {
    if (!gacc_isa_available(isa)) continue;
    for (const Shape& shape : shapes) {
      for (int options = 0; options < 8; ++options, ++calls) {
        attention(shape, GACC_F32 + static_cast<int32_t>(calls % 3), isa, options, 1 + static_cast<int32_t>(calls % 4));
      }
    }
    adam(isa, 4);
    rows(isa);
    grouped_convolutions(isa);
  }
  cuts();
  products();
  streams();
  std::printf("%d Snappy blocks of 4000 were whole\n", records());
  // Several callers at once, as XLA's virtual devices are.
  state = 1;
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([] {
      gacc_attention at{};
      const int64_t numel = 2 * 2 * 130 * 32;
      std::vector<float> q(numel, 0.5f), out(numel), lse(2 * 2 * 130), grads(3 * numel);
      at.q = at.k = at.v = q.data();
      at.batch = at.heads = at.kv_heads = 2, at.q_len = at.kv_len = 130, at.head_dim = at.value_dim = 32;
      at.left = -1, at.right = 0, at.dtype = GACC_F32, at.scale = 0.1f;
      for (int repeat = 0; repeat < 5; ++repeat) {
        require(gacc_flash_forward(&at, out.data(), lse.data(), 0, 3));
        require(gacc_flash_backward(&at, q.data(), out.data(), lse.data(), grads.data(), grads.data() + numel,
                                    grads.data() + 2 * numel, nullptr, 0, 3));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  std::printf("%lld attentions, Adam and four callers at once: clean\n", static_cast<long long>(calls));
  return 0;
}

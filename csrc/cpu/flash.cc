// gacc_flash_forward and gacc_flash_backward: check their arguments, cut the work into tasks and hand them to the kernels.
#include "flash.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "error.h"
#include "isa.h"
#include "parallel.h"

namespace {

using gacc::fail;
using gacc::key_tile;
using gacc::query_tile;
using gacc::round_up;

constexpr int64_t max_length = int64_t{1} << 30;  // positions are compared in 32 bits

struct Free {
  void operator()(float* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<float, Free>;

Buffer allocate(int64_t floats) {
  const size_t bytes = static_cast<size_t>(round_up(floats * 4, 64));
  Buffer buffer(static_cast<float*>(std::aligned_alloc(64, bytes)));
  if (!buffer) throw std::bad_alloc();
  return buffer;
}

// Tasks may be short (a block of a ring is a few queries), so each thread keeps its scratch memory from one to the next, unless
// that is much: gradients of the keys of a long sequence.
class Scratch {
 public:
  explicit Scratch(int64_t floats) {
    thread_local Buffer kept;
    thread_local int64_t size = 0;
    if (floats > max_kept_floats) {
      own_ = allocate(floats);
      data_ = own_.get();
      return;
    }
    if (size < floats) {
      kept.reset();
      size = 0;
      kept = allocate(floats);
      size = floats;
    }
    data_ = kept.get();
  }

  float* data() const { return data_; }

 private:
  static constexpr int64_t max_kept_floats = int64_t{1} << 19;  // 2 MB

  Buffer own_;
  float* data_;
};

const char* problem(const gacc_attention& at) {
  for (int64_t size : {at.batch, at.heads, at.q_len, at.kv_len}) {
    if (size < 0) return "a size is negative";
  }
  if (at.kv_heads < 1 || at.heads % at.kv_heads) return "heads is no multiple of kv_heads";
  if (at.head_dim < 1 || at.value_dim < 1) return "head_dim or value_dim is below 1";
  if (at.q_len > max_length || at.kv_len > max_length) return "q_len or kv_len is above 2^30";
  if (at.dtype < GACC_F32 || at.dtype > GACC_F16) return "dtype is not F32, BF16 or F16";
  if (at.empty_rows < GACC_ZEROS || at.empty_rows > GACC_UNIFORM_CONSTANT) return "empty_rows is unknown";
  if (!(at.dropout >= 0.0f && at.dropout <= 1.0f)) return "dropout is not in [0, 1]";
  const bool queries = at.batch > 0 && at.heads > 0 && at.q_len > 0;
  if (queries && (!at.q || (at.kv_len > 0 && (!at.k || !at.v)))) return "an array is null";
  if (queries && at.kv_len > 0 && (at.q_segments == nullptr) != (at.kv_segments == nullptr)) {
    return "only one of q_segments and kv_segments is given";
  }
  return nullptr;
}

int check(const gacc_attention* at, int32_t num_threads) {
  if (!at) return fail("attention is null");
  if (gacc::check_threads(num_threads)) return -1;
  const char* what = problem(*at);
  return what ? fail("%s", what) : 0;
}

}  // namespace

namespace gacc {

// A tile's rows of keys and values, each 16 columns wider, or of its queries and one more.
static int64_t row_buffers(int64_t dim, int64_t value_dim) {
  return std::max(key_tile * (dim + value_dim + 32), (query_tile + 1) * std::max(dim, value_dim));
}

int64_t flash_forward_scratch(const gacc_attention& at) {
  const int64_t dim = round_up(at.head_dim, 16), value_dim = round_up(at.value_dim, 16);
  return query_tile * (dim + value_dim + key_tile) + row_buffers(dim, value_dim);
}

int64_t flash_backward_scratch(const gacc_attention& at) {
  const int64_t dim = round_up(at.head_dim, 16), value_dim = round_up(at.value_dim, 16);
  const int64_t tiles = query_tile * (3 * dim + 2 * value_dim + 2 * key_tile) + row_buffers(dim, value_dim);
  return round_up(at.kv_len, key_tile) * (dim + value_dim) + tiles;
}

}  // namespace gacc

int32_t gacc_flash_forward(const gacc_attention* attention, void* out, float* lse, int32_t isa, int32_t num_threads) {
  const gacc::FlashKernels* kernels = gacc::find_flash_kernels(isa);
  if (!kernels || check(attention, num_threads)) return -1;
  const gacc_attention& at = *attention;
  const int64_t tiles = (at.q_len + query_tile - 1) / query_tile;
  return gacc::run_parallel(at.batch * at.heads * tiles, num_threads, [&](int64_t task) {
    const int64_t head = task / tiles;
    const Scratch scratch(gacc::flash_forward_scratch(at));
    const int64_t tile = tiles - 1 - task % tiles;  // the last tiles see the most keys under a causal mask, and go first
    kernels->forward(at, head / at.heads, head % at.heads, tile, out, lse, scratch.data());
  });
}

// A task owns what it writes: the key/value heads of a sample, or all samples (heads) if they share a gradient of the bias.
int32_t gacc_flash_backward(const gacc_attention* attention, const void* grad, const void* out, const float* lse, void* grad_q,
                            void* grad_k, void* grad_v, float* grad_bias, int32_t isa, int32_t num_threads) {
  const gacc::FlashKernels* kernels = gacc::find_flash_kernels(isa);
  if (!kernels || check(attention, num_threads)) return -1;
  const gacc_attention& at = *attention;
  if (grad_bias && !at.bias) return fail("a gradient is asked for of a bias that is null");
  const gacc::FlashBackward io{grad, out, lse, grad_q, grad_k, grad_v, grad_bias};
  const int64_t batches = grad_bias && at.bias_strides[0] == 0 ? 1 : at.batch;
  const int64_t heads = grad_bias && at.bias_strides[1] == 0 ? 1 : at.kv_heads;
  return gacc::run_parallel(at.batch ? batches * heads : 0, num_threads, [&](int64_t task) {
    const int64_t batch = task / heads, head = task % heads;
    const Scratch scratch(gacc::flash_backward_scratch(at));
    kernels->backward(at, io, {batch, batches == 1 ? at.batch : batch + 1, head, heads == 1 ? at.kv_heads : head + 1},
                      scratch.data());
  });
}

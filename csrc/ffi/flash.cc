// FlashAttention as XLA FFI custom calls on the CPU. Operands that are absent have no elements.
#include <algorithm>
#include <string>
#include <thread>

#include "gacc.h"
#include "handler.h"
#include "isa.h"

namespace ffi = xla::ffi;

namespace {

using gacc::Array;
using gacc::dtype_of;
using gacc::invalid;
using Numbers = ffi::Span<const int64_t>;

template <typename Element>
const Element* optional(const Array& array) {
  return array.element_count() ? static_cast<const Element*>(array.untyped_data()) : nullptr;
}

// The strides of a dense array that broadcasts to [B, H, T, S] where a dim is 1.
void broadcast_strides(ffi::Span<const int64_t> dims, int64_t* strides) {
  int64_t stride = 1;
  for (int i = 3; i >= 0; --i) {
    strides[i] = dims[i] == 1 ? 0 : stride;
    stride *= dims[i];
  }
}

// XLA gives every virtual device a thread, so the kernels add no more threads than there are processors.
int32_t num_threads() { return static_cast<int32_t>(std::clamp(std::thread::hardware_concurrency(), 1u, 1024u)); }

struct Options {
  double scale;
  int64_t left, right, empty_rows;
  double dropout;
  int64_t stream;
  Numbers global_size;
};

struct Operands {
  const Array &q, &k, &v, &bias, &q_segments, &kv_segments, &key, &start;
};

std::string read(const Operands& in, const Options& options, gacc_attention& at) {
  const auto q = in.q.dimensions(), k = in.k.dimensions(), v = in.v.dimensions();
  if (q.size() != 4 || k.size() != 4 || v.size() != 4) return "q, k and v must have 4 dims";
  const bool fits = k[0] == q[0] && k[3] == q[3] && v[0] == k[0] && v[1] == k[1] && v[2] == k[2];
  if (!fits || in.k.element_type() != in.q.element_type() || in.v.element_type() != in.q.element_type()) {
    return "the shapes or dtypes of q, k and v do not fit";
  }
  at = {};
  at.q = in.q.untyped_data();
  at.k = in.k.untyped_data();
  at.v = in.v.untyped_data();
  at.bias = optional<float>(in.bias);
  at.q_segments = optional<int32_t>(in.q_segments);
  at.kv_segments = optional<int32_t>(in.kv_segments);
  if (at.bias) broadcast_strides(in.bias.dimensions(), at.bias_strides);
  at.batch = q[0], at.heads = q[1], at.q_len = q[2], at.head_dim = q[3];
  at.kv_heads = k[1], at.kv_len = k[2], at.value_dim = v[3];
  at.left = options.left, at.right = options.right;
  at.dtype = dtype_of(in.q.element_type());
  at.empty_rows = static_cast<int32_t>(options.empty_rows);
  at.scale = static_cast<float>(options.scale);
  at.dropout = static_cast<float>(options.dropout);
  at.stream = options.stream;
  if (const auto* key = optional<int64_t>(in.key)) {
    for (int i = 0; i < 2; ++i) at.key[i] = static_cast<uint32_t>(key[i]);
    if (options.global_size.size() != 4) return "dropout needs a global_size of 4 numbers";
    std::copy(options.global_size.begin(), options.global_size.end(), at.global_size);
  } else if (options.dropout > 0.0) {
    return "dropout needs a key";
  }
  if (const auto* start = optional<int64_t>(in.start)) std::copy(start, start + 4, at.start);
  return "";
}

ffi::Error finish(int32_t status) { return status == 0 ? ffi::Error::Success() : invalid(gacc_last_error()); }

ffi::Error forward(Array q, Array k, Array v, Array bias, Array q_segments, Array kv_segments, Array key, Array start,
                   ffi::Result<Array> out, ffi::Result<Array> lse, double scale, int64_t left, int64_t right, int64_t empty_rows,
                   double dropout, int64_t stream, Numbers global_size) {
  gacc_attention at;
  const std::string problem = read({q, k, v, bias, q_segments, kv_segments, key, start},
                                   {scale, left, right, empty_rows, dropout, stream, global_size}, at);
  if (!problem.empty()) return invalid(problem);
  return finish(gacc_flash_forward(&at, out->untyped_data(), static_cast<float*>(lse->untyped_data()), gacc::best_isa(),
                                   num_threads()));
}

ffi::Error backward(Array grad, Array q, Array k, Array v, Array bias, Array q_segments, Array kv_segments, Array key,
                    Array start, Array out, Array lse, ffi::Result<Array> grad_q, ffi::Result<Array> grad_k,
                    ffi::Result<Array> grad_v, ffi::Result<Array> grad_bias, double scale, int64_t left, int64_t right,
                    int64_t empty_rows, double dropout, int64_t stream, Numbers global_size) {
  gacc_attention at;
  const std::string problem = read({q, k, v, bias, q_segments, kv_segments, key, start},
                                   {scale, left, right, empty_rows, dropout, stream, global_size}, at);
  if (!problem.empty()) return invalid(problem);
  float* grads = grad_bias->element_count() ? static_cast<float*>(grad_bias->untyped_data()) : nullptr;
  if (grads) std::fill_n(grads, grad_bias->element_count(), 0.0f);
  return finish(gacc_flash_backward(&at, grad.untyped_data(), out.untyped_data(), static_cast<const float*>(lse.untyped_data()),
                                    grad_q->untyped_data(), grad_k->untyped_data(), grad_v->untyped_data(), grads,
                                    gacc::best_isa(), num_threads()));
}

template <typename Binding>
auto with_options(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Attr<double>("scale")
      .template Attr<int64_t>("left")
      .template Attr<int64_t>("right")
      .template Attr<int64_t>("empty_rows")
      .template Attr<double>("dropout")
      .template Attr<int64_t>("stream")
      .template Attr<Numbers>("global_size");
}

}  // namespace

GACC_FFI_HANDLER(gacc_flash_forward_ffi, forward,
                 with_options(ffi::Ffi::Bind()
                                  .Arg<Array>().Arg<Array>().Arg<Array>().Arg<Array>()
                                  .Arg<Array>().Arg<Array>().Arg<Array>().Arg<Array>()
                                  .Ret<Array>().Ret<Array>()));

GACC_FFI_HANDLER(gacc_flash_backward_ffi, backward,
                 with_options(ffi::Ffi::Bind()
                                  .Arg<Array>().Arg<Array>().Arg<Array>().Arg<Array>().Arg<Array>().Arg<Array>()
                                  .Arg<Array>().Arg<Array>().Arg<Array>().Arg<Array>().Arg<Array>()
                                  .Ret<Array>().Ret<Array>().Ret<Array>().Ret<Array>()));

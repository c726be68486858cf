// Convolutions in groups and their gradients as XLA FFI custom calls on the CPU, on XLA's own threads. All arrays are fp32.
#include <algorithm>

#include "grouped_conv_pairs.h"
#include "handler.h"
#include "isa.h"
#include "tasks.h"

namespace ffi = xla::ffi;

namespace {

using gacc::Array;
using gacc::invalid;
using Result = ffi::Result<Array>;
using Numbers = ffi::Span<const int64_t>;

constexpr int64_t operations_per_task = 1 << 20;

struct Sizes {
  int64_t stride[2], padding[2], dilation[2];
};

const float* floats(const Array& array) { return static_cast<const float*>(array.untyped_data()); }

// What the arrays say: images [N, H, W, channels] and filters [KH, KW, groups, of one image's group, of the other's].
std::string read(const Array& in, const Array& filters, const Array& out, Numbers stride, Numbers padding, Numbers dilation, Sizes& sizes) {
  for (const Array* array : {&in, &filters, &out}) {
    if (array->element_type() != ffi::DataType::F32) return "grouped convolutions are of fp32";
  }
  const auto a = in.dimensions(), b = out.dimensions(), f = filters.dimensions();
  if (a.size() != 4 || b.size() != 4 || f.size() != 5) return "images have 4 dims, filters 5";
  if (a[0] != b[0] || a[3] != f[2] * f[3] || b[3] != f[2] * f[4]) return "the images and the filters of a grouped convolution do not fit";
  if (stride.size() != 2 || padding.size() != 2 || dilation.size() != 2) return "stride, padding and dilation have 2 numbers each";
  for (int i = 0; i < 2; ++i) {
    if (stride[i] < 1 || dilation[i] < 1) return "stride and dilation are at least 1";
    sizes.stride[i] = stride[i], sizes.padding[i] = padding[i], sizes.dilation[i] = dilation[i];
  }
  return "";
}

template <typename Task>
ffi::Error run(ffi::ThreadPool& pool, int64_t num_tasks, const Task& task) {
  const auto schedule = [&](auto&& helper) { pool.Schedule(std::forward<decltype(helper)>(helper)); };
  gacc::run_tasks(num_tasks, std::max<int64_t>(pool.num_threads(), 1), schedule, [&](int64_t i) {
    task(i);
    return true;
  });
  return ffi::Error::Success();
}

ffi::Error gather(ffi::ThreadPool& pool, const Array& in, const Array& weight, Array& out, Numbers stride, Numbers padding, Numbers dilation,
                  bool to_coarse) {
  Sizes s;
  if (const std::string why = read(in, weight, out, stride, padding, dilation, s); !why.empty()) return invalid(why);
  const auto di = in.dimensions(), dout = out.dimensions(), dw = weight.dimensions();
  const gacc::Pairs rows(dout[1], di[1], dw[0], s.stride[0], s.padding[0], s.dilation[0], to_coarse);
  const gacc::Pairs columns(dout[2], di[2], dw[1], s.stride[1], s.padding[1], s.dilation[1], to_coarse);
  const gacc::Gather at{floats(in), floats(weight), static_cast<float*>(out.untyped_data()), dw[2], dw[3], dw[4], {di[1], di[2]}, {dout[1], dout[2]},
                        {dw[0], dw[1]}, rows.taps(), columns.taps()};
  const int64_t num_rows = dout[0] * dout[1], of_a_row = std::max<int64_t>(1, dout[2] * dout[3] * dw[0] * dw[1] * dw[3]);
  const int64_t each = std::max<int64_t>(1, operations_per_task / of_a_row);
  const gacc::GroupedConvKernels* kernels = gacc::find_grouped_conv_kernels(gacc::best_isa());
  return run(pool, (num_rows + each - 1) / each, [&](int64_t i) { kernels->gather(at, i * each, std::min(num_rows, (i + 1) * each)); });
}

ffi::Error down(ffi::ThreadPool pool, Array fine, Array weight, Result coarse, Numbers stride, Numbers padding, Numbers dilation) {
  return gather(pool, fine, weight, *coarse, stride, padding, dilation, true);
}

ffi::Error up(ffi::ThreadPool pool, Array coarse, Array weight, Result fine, Numbers stride, Numbers padding, Numbers dilation) {
  return gather(pool, coarse, weight, *fine, stride, padding, dilation, false);
}

ffi::Error tie(ffi::ThreadPool pool, Array fine, Array coarse, Result weight, Numbers stride, Numbers padding, Numbers dilation) {
  Sizes s;
  if (const std::string why = read(fine, *weight, coarse, stride, padding, dilation, s); !why.empty()) return invalid(why);
  const auto df = fine.dimensions(), dc = coarse.dimensions(), dw = weight->dimensions();
  const gacc::Tie at{floats(coarse), floats(fine), static_cast<float*>(weight->untyped_data()), df[0], dw[2], dw[3], dw[4], {dc[1], dc[2]}, {df[1], df[2]},
                     {dw[0], dw[1]}, {s.stride[0], s.stride[1]}, {s.padding[0], s.padding[1]}, {s.dilation[0], s.dilation[1]}};
  // A task has one row of taps, some groups and some depths: as many as the kernels take at once, unless that leaves threads without work.
  const int64_t wanted = 4 * std::max<int64_t>(pool.num_threads(), 1);
  const auto parts = [](int64_t size, int64_t block) { return (size + block - 1) / block; };
  int64_t groups = 1, depths = dw[3];
  if (dw[3] == 1 && dw[4] == 1) {
    for (groups = 64; groups > 16 && dw[0] * parts(dw[2], groups) < wanted;) groups /= 2;
  } else {
    while (depths > 8 && dw[0] * dw[2] * parts(dw[3], depths) < wanted) depths = parts(parts(depths, 2), 8) * 8;
  }
  const int64_t num_groups = parts(dw[2], groups), num_depths = parts(dw[3], depths);
  const gacc::GroupedConvKernels* kernels = gacc::find_grouped_conv_kernels(gacc::best_isa());
  return run(pool, dw[0] * num_groups * num_depths, [&](int64_t i) {
    const int64_t group = i / num_depths % num_groups * groups, depth = i % num_depths * depths;
    const int64_t of_groups[2] = {group, std::min(dw[2], group + groups)}, of_depths[2] = {depth, std::min(dw[3], depth + depths)};
    kernels->tie(at, i / (num_groups * num_depths), of_groups, of_depths);
  });
}

auto of_two() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Array>().Arg<Array>().Ret<Array>().Attr<Numbers>("stride").Attr<Numbers>("padding").Attr<Numbers>(
      "dilation");
}

}  // namespace

GACC_FFI_HANDLER(gacc_grouped_conv_ffi, down, of_two());

GACC_FFI_HANDLER(gacc_grouped_conv_transposed_ffi, up, of_two());

GACC_FFI_HANDLER(gacc_grouped_conv_weight_ffi, tie, of_two());

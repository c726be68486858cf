// Largest elements and sums of exponentials of rows as XLA FFI custom calls on the CPU, on XLA's own threads.
#include "rows.h"

#include <algorithm>

#include "handler.h"
#include "isa.h"
#include "tasks.h"

namespace ffi = xla::ffi;

namespace {

using gacc::Array;
using gacc::invalid;
using Result = ffi::Result<Array>;

constexpr int64_t elements_per_task = 1 << 16;

ffi::Error run(ffi::ThreadPool& pool, const Array& x, gacc::RowSums at, int64_t size) {
  const auto dims = x.dimensions();
  at.dtype = gacc::dtype_of(x.element_type());
  if (dims.size() != 2 || dims[1] == 0 || dims[0] != size) return invalid("rows are an array of 2 dims, and their results have an element for each");
  if (at.dtype != GACC_F32 && at.dtype != GACC_BF16 && at.dtype != GACC_F16) return invalid("rows are of fp32, bf16 or fp16");
  at.x = x.untyped_data(), at.num_rows = dims[0], at.num_columns = dims[1];
  const gacc::RowKernels* kernels = gacc::find_row_kernels(gacc::best_isa());
  const int64_t each = std::max<int64_t>(1, elements_per_task / at.num_columns), num_tasks = (at.num_rows + each - 1) / each;
  const auto schedule = [&](auto&& helper) { pool.Schedule(std::forward<decltype(helper)>(helper)); };
  gacc::run_tasks(num_tasks, std::max<int64_t>(pool.num_threads(), 1), schedule, [&](int64_t i) {
    kernels->sums(at, i * each, std::min(at.num_rows, (i + 1) * each));
    return true;
  });
  return ffi::Error::Success();
}

bool is_column(const Array& array, int64_t size) {
  return array.element_type() == ffi::DataType::F32 && static_cast<int64_t>(array.element_count()) == size;
}

float* floats(Array& array) { return static_cast<float*>(array.untyped_data()); }

ffi::Error sums(ffi::ThreadPool pool, Array x, Result largest, Result sums) {
  const int64_t size = static_cast<int64_t>(largest->element_count());
  if (!is_column(*largest, size) || !is_column(*sums, size)) return invalid("results of rows are fp32, one for each row");
  return run(pool, x, {nullptr, 0, 0, 0, floats(*largest), nullptr, floats(*sums)}, size);
}

ffi::Error largest(ffi::ThreadPool pool, Array x, Result largest) {
  const int64_t size = static_cast<int64_t>(largest->element_count());
  if (!is_column(*largest, size)) return invalid("results of rows are fp32, one for each row");
  return run(pool, x, {nullptr, 0, 0, 0, floats(*largest), nullptr, nullptr}, size);
}

ffi::Error exponentials(ffi::ThreadPool pool, Array x, Array subtracted, Result sums) {
  const int64_t size = static_cast<int64_t>(sums->element_count());
  if (!is_column(subtracted, size) || !is_column(*sums, size)) return invalid("what is subtracted from rows, and their sums, are fp32, one for each row");
  return run(pool, x, {nullptr, 0, 0, 0, nullptr, floats(subtracted), floats(*sums)}, size);
}

auto on_threads() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

}  // namespace

GACC_FFI_HANDLER(gacc_row_sums_ffi, sums, on_threads().Arg<Array>().Ret<Array>().Ret<Array>());

GACC_FFI_HANDLER(gacc_row_largest_ffi, largest, on_threads().Arg<Array>().Ret<Array>());

GACC_FFI_HANDLER(gacc_row_exponentials_ffi, exponentials, on_threads().Arg<Array>().Arg<Array>().Ret<Array>());

// Products as XLA FFI custom calls on the CPU: torch's kernels, in pieces of one thread each, on XLA's own threads. So there is no second pool,
// and virtual devices share the processors.
#include "products.h"

#include <vector>

#include "handler.h"
#include "tasks.h"
#include "torch_products.h"

namespace ffi = xla::ffi;

namespace {

using gacc::Array;
using gacc::invalid;
using gacc::Piece;
using Result = ffi::Result<Array>;

int64_t num_threads(ffi::ThreadPool& pool) { return std::max<int64_t>(pool.num_threads(), 1); }

ffi::Error multiply(ffi::ThreadPool& pool, const std::vector<Piece>& pieces) {
  const auto schedule = [&](auto&& helper) { pool.Schedule(std::forward<decltype(helper)>(helper)); };
  const auto one = [&](int64_t i) {
    const gacc::OneThread alone;
    return gacc::torch_multiply(pieces[static_cast<size_t>(i)]);
  };
  if (gacc::run_tasks(static_cast<int64_t>(pieces.size()), num_threads(pool), schedule, one)) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, "a product by torch's kernels failed; torch has said why on stderr");
}

// Why arrays cannot be multiplied, or "".
std::string refusal(std::initializer_list<const Array*> arrays) {
  if (!gacc::has_torch_products()) return "the libtorch_cpu of this process has no aoti_torch_cpu_mm_out";
  const auto dtype = (*arrays.begin())->element_type();
  if (!gacc::dtype_of(dtype)) return "products take fp32, fp64, bf16 and fp16";
  for (const Array* array : arrays) {
    if (array->element_type() != dtype) return "the operands and the result of a product have different dtypes";
  }
  return "";
}

ffi::Error product(ffi::ThreadPool pool, Array a, Array b, Result out, bool a_transposed, bool b_transposed) {
  if (const std::string why = refusal({&a, &b, &*out}); !why.empty()) return invalid(why);
  const auto da = a.dimensions(), db = b.dimensions(), dout = out->dimensions();
  const size_t rank = da.size();
  if (rank < 2 || rank > 3 || db.size() != rank || dout.size() != rank) return invalid("a product takes two arrays of 2, or of 3 dims");
  const int64_t batch = rank == 3 ? da[0] : 1, m = da[rank - 2 + a_transposed], k = da[rank - 1 - a_transposed], n = db[rank - 1 - b_transposed];
  const bool fits = db[rank - 2 + b_transposed] == k && dout[rank - 2] == m && dout[rank - 1] == n;
  if (!fits || (rank == 3 && (db[0] != batch || dout[0] != batch))) return invalid("the shapes of a product do not fit");
  const gacc::Product whole{a.untyped_data(), b.untyped_data(), out->untyped_data(), batch, m, n, k, a_transposed, b_transposed,
                            gacc::dtype_of(a.element_type())};
  return multiply(pool, gacc::cut_product(whole, num_threads(pool)));
}

std::string read(const Array& ends, int64_t num_rows, gacc::Groups& groups) {
  if (ends.element_type() != ffi::DataType::S32 || ends.dimensions().size() != 1) return "the ends of groups must be int32, of 1 dim";
  groups = {static_cast<const int32_t*>(ends.untyped_data()), ends.dimensions()[0], num_rows};
  return "";
}

ffi::Error grouped(ffi::ThreadPool pool, Array rows, Array weight, Array ends, Result out, bool transposed) {
  if (const std::string why = refusal({&rows, &weight, &*out}); !why.empty()) return invalid(why);
  const auto dr = rows.dimensions(), dw = weight.dimensions(), dout = out->dimensions();
  if (dr.size() != 2 || dw.size() != 3 || dout.size() != 2) return invalid("a grouped product is of 2 and 3 dims");
  gacc::Groups groups;
  if (const std::string why = read(ends, dr[0], groups); !why.empty()) return invalid(why);
  const int64_t k = dw[1 + transposed], n = dw[2 - transposed];
  if (k != dr[1] || dout[0] != dr[0] || dout[1] != n || dw[0] != groups.num_groups) return invalid("the shapes of a grouped product do not fit");
  return multiply(pool, gacc::cut_grouped(rows.untyped_data(), weight.untyped_data(), out->untyped_data(), groups, n, k, transposed,
                                          gacc::dtype_of(rows.element_type()), num_threads(pool)));
}

ffi::Error grouped_outer(ffi::ThreadPool pool, Array a, Array b, Array ends, Result out) {
  if (const std::string why = refusal({&a, &b, &*out}); !why.empty()) return invalid(why);
  const auto da = a.dimensions(), db = b.dimensions(), dout = out->dimensions();
  if (da.size() != 2 || db.size() != 2 || dout.size() != 3) return invalid("a grouped outer product is of 2 and 2 dims");
  gacc::Groups groups;
  if (const std::string why = read(ends, da[0], groups); !why.empty()) return invalid(why);
  const bool fits = db[0] == da[0] && dout[0] == groups.num_groups && dout[1] == da[1] && dout[2] == db[1];
  if (!fits) return invalid("the shapes of a grouped outer product do not fit");
  return multiply(pool, gacc::cut_grouped_outer(a.untyped_data(), b.untyped_data(), out->untyped_data(), groups, da[1], db[1],
                                                gacc::dtype_of(a.element_type()), num_threads(pool)));
}

auto on_threads() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

}  // namespace

GACC_FFI_HANDLER(gacc_product_ffi, product,
                 on_threads().Arg<Array>().Arg<Array>().Ret<Array>().Attr<bool>("a_transposed").Attr<bool>("b_transposed"));

GACC_FFI_HANDLER(gacc_grouped_ffi, grouped, on_threads().Arg<Array>().Arg<Array>().Arg<Array>().Ret<Array>().Attr<bool>("transposed"));

GACC_FFI_HANDLER(gacc_grouped_outer_ffi, grouped_outer, on_threads().Arg<Array>().Arg<Array>().Arg<Array>().Ret<Array>());

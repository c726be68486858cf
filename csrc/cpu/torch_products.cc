#include "torch_products.h"

#include <dlfcn.h>

#include "gacc.h"
#include "isa.h"

namespace gacc {
namespace {

using Handle = struct AtenTensorOpaque*;

template <typename Function>
Function* find(void* library, const char* name) {
  return library ? reinterpret_cast<Function*>(dlsym(library, name)) : nullptr;
}

// Signatures as in torch/csrc/inductor/aoti_torch/c/shim.h, which torch keeps stable.
struct Torch {
  void* library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  int32_t (*from_blob)(void*, int64_t, const int64_t*, const int64_t*, int64_t, int32_t, int32_t, int32_t, Handle*) =
      find<int32_t(void*, int64_t, const int64_t*, const int64_t*, int64_t, int32_t, int32_t, int32_t, Handle*)>(
          library, "aoti_torch_create_tensor_from_blob");
  int32_t (*destroy)(Handle) = find<int32_t(Handle)>(library, "aoti_torch_delete_tensor_object");
  int32_t (*mm_out)(Handle, Handle, Handle) = find<int32_t(Handle, Handle, Handle)>(library, "aoti_torch_cpu_mm_out");
  // Of the libraries that libtorch_cpu depends on, whose team these kernels would use; without them it has none.
  int (*openmp_threads)() = find<int()>(library, "omp_get_max_threads");
  void (*set_openmp_threads)(int) = find<void(int)>(library, "omp_set_num_threads");
  int (*set_mkl_threads)(int) = find<int(int)>(library, "MKL_Set_Num_Threads_Local");
};

const Torch& torch() {
  static const Torch found;
  return found;
}

int32_t scalar_type(int32_t dtype) {  // c10::ScalarType
  switch (dtype) {
    case GACC_F16: return 5;
    case GACC_F32: return 6;
    case GACC_F64: return 7;
    default: return 15;
  }
}

// A torch tensor on memory of somebody else.
class Tensor {
 public:
  Tensor(const void* data, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride, int32_t dtype) {
    const int64_t sizes[2] = {rows, columns}, strides[2] = {row_stride, column_stride};
    if (torch().from_blob(const_cast<void*>(data), 2, sizes, strides, 0, scalar_type(dtype), /*CPU*/ 0, 0, &handle)) handle = nullptr;
  }
  ~Tensor() {
    if (handle) torch().destroy(handle);
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  Handle handle = nullptr;
};

}  // namespace

bool has_torch_products() { return torch().from_blob && torch().destroy && torch().mm_out; }

bool torch_multiply(const Piece& p) {
  Tensor a(p.a, p.m, p.k, p.a_strides[0], p.a_strides[1], p.dtype), b(p.b, p.k, p.n, p.b_strides[0], p.b_strides[1], p.dtype);
  Tensor out(p.out, p.m, p.n, p.out_stride, 1, p.dtype);
  return a.handle && b.handle && out.handle && torch().mm_out(out.handle, a.handle, b.handle) == 0;
}

OneThread::OneThread() {
  if (torch().openmp_threads && torch().set_openmp_threads) {
    openmp_ = torch().openmp_threads();
    torch().set_openmp_threads(1);
  }
  if (torch().set_mkl_threads) mkl_ = torch().set_mkl_threads(1);
}

OneThread::~OneThread() {
  if (openmp_) torch().set_openmp_threads(openmp_);
  if (torch().set_mkl_threads) torch().set_mkl_threads(mkl_);
}

}  // namespace gacc

int32_t gacc_has_products(void) { return gacc::has_torch_products(); }

int32_t gacc_multiplies_natively(int32_t dtype) {
  return dtype == GACC_F32 || dtype == GACC_F64 || (dtype == GACC_BF16 && gacc::cpu_multiplies_bf16()) ||
         (dtype == GACC_F16 && gacc::cpu_multiplies_f16());
}

// Products by the kernels that torch has on the CPU (MKL, oneDNN), through its stable C shim (aoti_torch_*).
#pragma once

#include "products.h"

namespace gacc {

// Whether the libtorch_cpu of this process has what `torch_multiply` calls. Nothing of torch is linked or included.
bool has_torch_products();

// One piece, on the calling thread alone between `OneThread`'s constructor and destructor. False after torch has written to stderr why not.
bool torch_multiply(const Piece& piece);

// While it exists, torch's kernels called on this thread use no other threads.
class OneThread {
 public:
  OneThread();
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int openmp_ = 0, mkl_ = 0;
};

}  // namespace gacc

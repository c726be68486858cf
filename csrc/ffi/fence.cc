// An array as it is, behind a call that XLA fuses nothing across.
#include <cstring>

#include "handler.h"

namespace ffi = xla::ffi;

namespace {

// XLA is told that the result may take the operand's memory; where it has to keep both, they are two arrays.
ffi::Error fence(gacc::Array x, ffi::Result<gacc::Array> out) {
  if (out->size_bytes() != x.size_bytes()) return gacc::invalid("the result of a fence has another size than its operand");
  if (out->untyped_data() != x.untyped_data()) std::memcpy(out->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}

}  // namespace

GACC_FFI_HANDLER(gacc_fence_ffi, fence, ffi::Ffi::Bind().Arg<gacc::Array>().Ret<gacc::Array>());

// What the FFI handlers, which XLA calls for its custom calls on the CPU, have in common.
#pragma once

#include <string>

#include "gacc.h"
#include "xla/ffi/api/ffi.h"

namespace gacc {

using Array = xla::ffi::AnyBuffer;

inline xla::ffi::Error invalid(const std::string& what) { return xla::ffi::Error(xla::ffi::ErrorCode::kInvalidArgument, what); }

inline int32_t dtype_of(xla::ffi::DataType dtype) {
  switch (dtype) {
    case xla::ffi::DataType::F32: return GACC_F32;
    case xla::ffi::DataType::BF16: return GACC_BF16;
    case xla::ffi::DataType::F16: return GACC_F16;
    case xla::ffi::DataType::F64: return GACC_F64;
    default: return GACC_NONE;
  }
}

}  // namespace gacc

// The library hides its symbols, and XLA's macro sets no visibility.
#define GACC_FFI_HANDLER(name, function, binding)  \
  GACC_API XLA_FFI_Error* name(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, binding)

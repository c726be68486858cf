// What the FFI handlers, which XLA calls for its custom calls on the CPU, have in common.
#pragma once

#include <string>

#include "gacc.h"
#include "xla/ffi/api/ffi.h"

namespace gacc {

using Array = xla::ffi::AnyBuffer;

inline xla::ffi::Error invalid(const std::string& what) { return xla::ffi::Error(xla::ffi::ErrorCode::kInvalidArgument, what); }

}  // namespace gacc

// The library hides its symbols, and XLA's macro sets no visibility.
#define GACC_FFI_HANDLER(name, function, binding)  \
  GACC_API XLA_FFI_Error* name(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, binding)

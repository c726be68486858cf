// An array that leaves for the host while the program goes on, as an XLA FFI custom call on the CPU.
#include "handler.h"

namespace ffi = xla::ffi;

namespace {

// `stream` is the number of an open stream and this device's place in it; the result is a byte that keeps the call alive.
ffi::Error send_to_host(gacc::Array x, ffi::Buffer<ffi::DataType::S64> stream, int64_t slot, ffi::Result<ffi::Buffer<ffi::DataType::U8>> sent) {
  if (stream.element_count() != 2) return gacc::invalid("a stream is two numbers: its own, and the device's place in it");
  const int64_t* place = stream.typed_data();
  if (gacc_stream_send(place[0], place[1], slot, x.untyped_data(), static_cast<int64_t>(x.size_bytes()))) return gacc::invalid(gacc_last_error());
  sent->typed_data()[0] = 1;
  return ffi::Error::Success();
}

}  // namespace

GACC_FFI_HANDLER(gacc_send_to_host_ffi, send_to_host,
                 ffi::Ffi::Bind().Arg<gacc::Array>().Arg<ffi::Buffer<ffi::DataType::S64>>().Attr<int64_t>("slot").Ret<ffi::Buffer<ffi::DataType::U8>>());

#include "error.h"

#include <cstdarg>
#include <cstdio>

#include "gacc.h"

namespace {
thread_local char message[256];
}

namespace gacc {

int fail(const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::vsnprintf(message, sizeof(message), format, args);
  va_end(args);
  return -1;
}

}  // namespace gacc

int32_t gacc_abi_version() { return GACC_ABI_VERSION; }

const char* gacc_last_error() { return message; }

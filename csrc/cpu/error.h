// Errors of the C ABI: a message per thread.
#pragma once

namespace gacc {

// Stores the message for gacc_last_error() and returns -1.
int fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace gacc

// Decompression of a raw Snappy block (google/snappy, format_description.txt): literals, and copies of earlier output.
#include <cstring>

#include "error.h"
#include "gacc.h"

namespace {

// Reads little-endian numbers; false where the input ends.
class Input {
 public:
  Input(const uint8_t* data, int64_t size) : at_(data), end_(data + size) {}

  bool empty() const { return at_ == end_; }

  bool read(int num_bytes, int64_t* value) {
    if (end_ - at_ < num_bytes) return false;
    *value = 0;
    for (int i = 0; i < num_bytes; i++) *value |= static_cast<int64_t>(*at_++) << (8 * i);
    return true;
  }

  bool copy(uint8_t* to, int64_t size) {
    if (end_ - at_ < size) return false;
    std::memcpy(to, at_, static_cast<size_t>(size));
    at_ += size;
    return true;
  }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

enum Element { kLiteral = 0, kCopy1 = 1, kCopy2 = 2, kCopy4 = 3 };

// Length and distance of a copy whose tag has been read.
bool read_copy(Input& input, int64_t tag, int64_t* length, int64_t* distance) {
  if ((tag & 3) != kCopy1) {
    *length = (tag >> 2) + 1;
    return input.read((tag & 3) == kCopy2 ? 2 : 4, distance);
  }
  *length = (tag >> 2 & 7) + 4;
  if (!input.read(1, distance)) return false;
  *distance |= tag >> 5 << 8;
  return true;
}

bool read_literal_length(Input& input, int64_t tag, int64_t* length) {
  *length = tag >> 2;
  if (*length >= 60 && !input.read(static_cast<int>(*length) - 59, length)) return false;
  ++*length;
  return true;
}

}  // namespace

int32_t gacc_snappy_decompress(const uint8_t* data, int64_t size, uint8_t* out, int64_t out_size) {
  if (size < 0 || out_size < 0 || (!data && size) || (!out && out_size)) return gacc::fail("a null pointer or a size < 0");
  Input input(data, size);
  int64_t at = 0;
  while (!input.empty()) {
    int64_t tag, length, distance = 0;
    input.read(1, &tag);
    const bool literal = (tag & 3) == kLiteral;
    if (!(literal ? read_literal_length(input, tag, &length) : read_copy(input, tag, &length, &distance))) {
      return gacc::fail("the data ends inside an element");
    }
    if (length > out_size - at) return gacc::fail("more than %lld bytes come out", static_cast<long long>(out_size));
    if (literal) {
      if (!input.copy(out + at, length)) return gacc::fail("the data ends inside a literal");
    } else {
      if (distance == 0 || distance > at) return gacc::fail("a copy reaches %lld bytes back at byte %lld",
                                                            static_cast<long long>(distance), static_cast<long long>(at));
      for (int64_t i = 0; i < length; i++) out[at + i] = out[at + i - distance];  // may overlap itself
    }
    at += length;
  }
  if (at != out_size) {
    return gacc::fail("%lld bytes come out, not %lld", static_cast<long long>(at), static_cast<long long>(out_size));
  }
  return 0;
}

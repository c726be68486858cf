// HighwayHash-64 (Alakuijala, Cox, Wassenberg, arXiv 1612.06257), which Riegeli files carry over every header and every chunk.
#include <algorithm>
#include <array>
#include <cstring>

#include "error.h"
#include "gacc.h"

namespace {

constexpr int kLanes = 4;
constexpr int64_t kPacketBytes = 8 * kLanes;
constexpr int kFinalRounds = 4;

using Lanes = std::array<uint64_t, kLanes>;

constexpr Lanes kMul0 = {0xdbe6d5d5fe4cce2f, 0xa4093822299f31d0, 0x13198a2e03707344, 0x243f6a8885a308d3};
constexpr Lanes kMul1 = {0x3bd39e10cb0ef593, 0xc0acf169b5f18a8c, 0xbe5466cf34e90c6c, 0x452821e638d01377};

uint64_t swap_halves(uint64_t x) { return x >> 32 | x << 32; }

uint64_t byte_of(uint64_t x, int index) { return x >> (8 * index) & 0xff; }

// Bytes of two neighbouring lanes, in the order of the paper's "zipper merge": 0..7 name the lower lane's, 8..15 the upper lane's.
uint64_t gather(uint64_t lower, uint64_t upper, const int (&order)[8]) {
  uint64_t gathered = 0;
  for (int i = 0; i < 8; i++) gathered |= byte_of(order[i] < 8 ? lower : upper, order[i] & 7) << (8 * i);
  return gathered;
}

void add_zipped(Lanes& sums, const Lanes& source) {
  static constexpr int kLower[8] = {3, 12, 2, 5, 14, 1, 15, 0};
  static constexpr int kUpper[8] = {11, 4, 10, 13, 9, 6, 8, 7};
  for (int i = 0; i < kLanes; i += 2) {
    sums[i] += gather(source[i], source[i + 1], kLower);
    sums[i + 1] += gather(source[i], source[i + 1], kUpper);
  }
}

class HighwayHash {
 public:
  explicit HighwayHash(const uint64_t* key) : mul0_(kMul0), mul1_(kMul1) {
    for (int i = 0; i < kLanes; i++) {
      v0_[i] = mul0_[i] ^ key[i];
      v1_[i] = mul1_[i] ^ swap_halves(key[i]);
    }
  }

  void update(const uint8_t* packet) {
    Lanes lanes;
    std::memcpy(lanes.data(), packet, kPacketBytes);
    update(lanes);
  }

  // The last `size` < 32 bytes: lengthened to a packet in a way that depends on `size`.
  void update_remainder(const uint8_t* data, int64_t size) {
    const uint64_t added = (static_cast<uint64_t>(size) << 32) + static_cast<uint64_t>(size);
    for (uint64_t& v : v0_) v += added;
    for (uint64_t& v : v1_) v = rotate_halves(v, static_cast<int>(size));
    uint8_t packet[kPacketBytes] = {};
    const int64_t whole = size & ~int64_t{3}, odd = size & 3;
    std::memcpy(packet, data, static_cast<size_t>(whole));
    if (size & 16) {
      std::memcpy(packet + 28, data + size - 4, 4);
    } else if (odd) {
      packet[16] = data[whole];
      packet[17] = data[whole + (odd >> 1)];
      packet[18] = data[size - 1];
    }
    update(packet);
  }

  uint64_t finish() {
    for (int round = 0; round < kFinalRounds; round++) {
      update(Lanes{swap_halves(v0_[2]), swap_halves(v0_[3]), swap_halves(v0_[0]), swap_halves(v0_[1])});
    }
    return v0_[0] + v1_[0] + mul0_[0] + mul1_[0];
  }

 private:
  void update(const Lanes& lanes) {
    for (int i = 0; i < kLanes; i++) {
      v1_[i] += mul0_[i] + lanes[i];
      mul0_[i] ^= (v1_[i] & 0xffffffff) * (v0_[i] >> 32);
      v0_[i] += mul1_[i];
      mul1_[i] ^= (v0_[i] & 0xffffffff) * (v1_[i] >> 32);
    }
    add_zipped(v0_, v1_);
    add_zipped(v1_, v0_);
  }

  static uint64_t rotate_halves(uint64_t x, int bits) {
    const auto rotate = [bits](uint32_t half) { return bits ? half << bits | half >> (32 - bits) : half; };
    return static_cast<uint64_t>(rotate(static_cast<uint32_t>(x >> 32))) << 32 | rotate(static_cast<uint32_t>(x));
  }

  Lanes mul0_, mul1_, v0_, v1_;
};

}  // namespace

int32_t gacc_highway_hash64(const uint64_t* key, const uint8_t* data, int64_t size, uint64_t* hash) {
  if (!key || !hash || size < 0 || (!data && size)) return gacc::fail("a null pointer or size < 0");
  HighwayHash state(key);
  const int64_t whole = size / kPacketBytes * kPacketBytes;
  for (int64_t at = 0; at < whole; at += kPacketBytes) state.update(data + at);
  if (size > whole) state.update_remainder(data + whole, size - whole);
  *hash = state.finish();
  return 0;
}

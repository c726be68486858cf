// What grouped_conv.h's kernels are told of one dim.
#pragma once

#include <stddef.h>

#include <algorithm>
#include <vector>

#include "grouped_conv.h"

namespace gacc {

// The pairs of `num_targets` elements along one dim: of coarse ones among fine ones, or the other way round.
struct Pairs {
  std::vector<int32_t> begin, source, tap;
  std::vector<uint8_t> shared;

  Pairs(int64_t num_targets, int64_t num_sources, int64_t num_taps, int64_t stride, int64_t padding, int64_t dilation, bool coarse_targets) {
    begin.push_back(0);
    for (int64_t target = 0; target < num_targets; ++target) {
      for (int64_t k = 0; k < num_taps; ++k) {
        int64_t at = coarse_targets ? target * stride - padding + k * dilation : target + padding - k * dilation;
        if (!coarse_targets) {
          if (at % stride) continue;
          at /= stride;
        }
        if (at < 0 || at >= num_sources) continue;
        source.push_back(static_cast<int32_t>(at)), tap.push_back(static_cast<int32_t>(k));
      }
      begin.push_back(static_cast<int32_t>(source.size()));
    }
    shared.resize(begin.size() - 1);
    for (int64_t target = 0; target + 4 <= num_targets; ++target) {
      shared[static_cast<size_t>(target)] = same(target, target + 1) && same(target, target + 2) && same(target, target + 3);
    }
  }

  bool same(int64_t a, int64_t b) const {
    const auto at = [&](int64_t target) { return tap.begin() + begin[static_cast<size_t>(target)]; };
    return std::equal(at(a), at(a + 1), at(b), at(b + 1));
  }

  Taps taps() const { return {begin.data(), source.data(), tap.data(), shared.data()}; }
};

}  // namespace gacc

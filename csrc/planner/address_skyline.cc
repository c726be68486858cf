// Placement on a skyline, the upper contour of what has been placed: lowest possible item next, or in a given order.
#include <algorithm>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "../cpu/error.h"
#include "planner.h"

namespace gacc {
namespace {

// An array of heights with "raise a range to at least h" and "largest of a range", both in O(log n).
class Heights {
 public:
  explicit Heights(int64_t size) : size_(size), largest_(2 * size), raised_(2 * size) {}

  void raise(int64_t first, int64_t last, int64_t height) {
    const int64_t lo = first + size_, hi = last - 1 + size_;
    for (int64_t l = lo, r = hi + 1; l < r; l /= 2, r /= 2) {
      if (l & 1) raise_node(l++, height);
      if (r & 1) raise_node(--r, height);
    }
    for (int64_t node = lo / 2; node >= 1; node /= 2) largest_[node] = std::max(largest_[node], height);
    for (int64_t node = hi / 2; node >= 1; node /= 2) largest_[node] = std::max(largest_[node], height);
  }

  int64_t largest(int64_t first, int64_t last) const {
    const int64_t lo = first + size_, hi = last - 1 + size_;
    int64_t found = 0;
    for (int64_t l = lo, r = hi + 1; l < r; l /= 2, r /= 2) {
      if (l & 1) found = std::max(found, largest_[l++]);
      if (r & 1) found = std::max(found, largest_[--r]);
    }
    for (int64_t node = lo / 2; node >= 1; node /= 2) found = std::max(found, raised_[node]);
    for (int64_t node = hi / 2; node >= 1; node /= 2) found = std::max(found, raised_[node]);
    return found;
  }

 private:
  void raise_node(int64_t node, int64_t height) {
    largest_[node] = std::max(largest_[node], height);
    raised_[node] = std::max(raised_[node], height);
  }

  int64_t size_;
  std::vector<int64_t> largest_;  // of the leaves below the node
  std::vector<int64_t> raised_;   // what the whole node was raised to
};

class Skyline {
 public:
  Skyline(const gacc_address_problem& problem, int64_t* offsets)
      : p_(problem), offsets_(offsets), heights_(problem.num_sections) {
    for (int64_t i = 0; i < p_.num_items; ++i) {
      if (p_.fixed[i] < 0) continue;
      fixed_.push_back(i);
      offsets_[i] = p_.fixed[i];
    }
    std::sort(fixed_.begin(), fixed_.end(), [&](int64_t a, int64_t b) { return p_.fixed[a] < p_.fixed[b]; });
  }

  // The lowest offset above all placed items that live at the same time at which the item overlaps no fixed one.
  int64_t lowest(int64_t item) const {
    int64_t offset = heights_.largest(p_.first[item], p_.last[item]);
    for (int64_t j : fixed_) {
      if (p_.first[item] >= p_.last[j] || p_.first[j] >= p_.last[item] || p_.fixed[j] + p_.size[j] <= offset) continue;
      if (p_.fixed[j] >= offset + p_.size[item]) break;
      offset = p_.fixed[j] + p_.size[j];
    }
    return offset;
  }

  void place(int64_t item, int64_t offset) {
    offsets_[item] = offset;
    heights_.raise(p_.first[item], p_.last[item], offset + p_.size[item]);
  }

 private:
  const gacc_address_problem& p_;
  int64_t* offsets_;
  Heights heights_;
  std::vector<int64_t> fixed_;  // by offset
};

}  // namespace
}  // namespace gacc

int32_t gacc_address_skyline(const gacc_address_problem* problem, int64_t* offsets) {
  const gacc_address_problem& p = *problem;
  if (p.num_items <= 0) return gacc::fail("num_items is %ld, expected at least 1", static_cast<long>(p.num_items));
  using Entry = std::pair<int64_t, int64_t>;  // a lower bound of the offset, the item
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> queue;
  gacc::Skyline skyline(p, offsets);
  for (int64_t i = 0; i < p.num_items; ++i) {
    if (p.fixed[i] < 0) queue.push({0, i});
  }
  while (!queue.empty()) {
    const auto [bound, i] = queue.top();
    queue.pop();
    const int64_t offset = skyline.lowest(i);
    if (offset > bound) {
      queue.push({offset, i});
    } else {
      skyline.place(i, offset);
    }
  }
  return 0;
}

int32_t gacc_address_settle(const gacc_address_problem* problem, int64_t* offsets) {
  const gacc_address_problem& p = *problem;
  if (p.num_items <= 0) return gacc::fail("num_items is %ld, expected at least 1", static_cast<long>(p.num_items));
  gacc::Skyline skyline(p, offsets);
  for (int64_t i = 0; i < p.num_items; ++i) {
    if (p.fixed[i] < 0) skyline.place(i, skyline.lowest(i));
  }
  return 0;
}

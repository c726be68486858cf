// Beam search over placements in order of offset: the states of a level have placed equally many items.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <unordered_set>
#include <vector>

#include "../cpu/error.h"
#include "address_state.h"

namespace gacc {
namespace {

class Beam {
 public:
  Beam(const gacc_address_problem& problem, int64_t width, double bias, const int32_t* stop)
      : state_(problem), width_(static_cast<size_t>(width)), stop_(stop), items_(state_.num_items()) {
    std::iota(items_.begin(), items_.end(), 0);
    for (int i : items_) keys_.push_back(mix(i));
    for (int s = 0; s < state_.num_sections(); ++s) {
      weights_.push_back(1.0 / (static_cast<double>(state_.slack(s)) + bias * static_cast<double>(problem.capacity[s])));
    }
  }

  int64_t run() {
    if (!state_.start()) return GACC_IMPOSSIBLE;
    level_.resize(1);
    state_.save(level_[0]);
    for (size_t placed = 0; placed < items_.size(); ++placed) {
      children_.clear();
      for (size_t parent = 0; parent < level_.size(); ++parent) {
        if (__atomic_load_n(stop_, __ATOMIC_RELAXED)) return GACC_STOPPED;
        expand(parent);
      }
      if (children_.empty()) return GACC_IMPOSSIBLE;
      keep_best();
    }
    state_.restore(level_[0]);
    return GACC_FOUND;
  }

  int64_t nodes() const { return nodes_; }
  const AddressState& state() const { return state_; }

 private:
  struct Child {
    double waste;
    size_t parent;
    int num_skips;  // before the placement that makes the child
    uint64_t hash;
  };

  int next() const { return state_.next(items_.data(), items_.data() + items_.size()); }

  void expand(size_t parent) {
    state_.restore(level_[parent]);
    for (int num_skips = 0;; ++num_skips) {
      const int item = next();
      if (item < 0) return;
      ++nodes_;
      const size_t before = state_.mark();
      if (state_.place(item)) children_.push_back({state_.waste(weights_), parent, num_skips, state_.hash(keys_)});
      state_.undo(before);
      if (!state_.skip(item)) return;
    }
  }

  void keep_best() {
    std::stable_sort(children_.begin(), children_.end(), [](const Child& a, const Child& b) { return a.waste < b.waste; });
    std::unordered_set<uint64_t> seen;
    next_level_.resize(std::min(width_, children_.size()));
    size_t kept = 0;
    for (const Child& child : children_) {
      if (kept == width_) break;
      if (!seen.insert(child.hash).second) continue;
      state_.restore(level_[child.parent]);
      for (int i = 0; i < child.num_skips; ++i) state_.skip(next());
      state_.place(next());
      state_.save(next_level_[kept++]);
    }
    next_level_.resize(kept);
    std::swap(level_, next_level_);
  }

  AddressState state_;
  size_t width_;
  const int32_t* stop_;
  std::vector<int> items_;
  std::vector<uint64_t> keys_;
  std::vector<double> weights_;
  std::vector<AddressState::Snapshot> level_, next_level_;
  std::vector<Child> children_;
  int64_t nodes_ = 0;
};

}  // namespace
}  // namespace gacc

int32_t gacc_address_beam(const gacc_address_problem* problem, int64_t width, double bias, const int32_t* stop, int64_t* offsets,
                          gacc_address_result* result) {
  if (problem->num_items <= 0) return gacc::fail("num_items is %ld, expected at least 1", static_cast<long>(problem->num_items));
  if (width <= 0) return gacc::fail("width is %lld, expected at least 1", static_cast<long long>(width));
  gacc::Beam beam(*problem, width, bias, stop);
  result->outcome = beam.run();
  result->nodes = beam.nodes();
  if (result->outcome == GACC_FOUND) {
    for (int i = 0; i < problem->num_items; ++i) offsets[i] = beam.state().offset(i);
  }
  return 0;
}

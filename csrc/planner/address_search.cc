// Depth-first search over placements in order of offset, split wherever the unplaced items fall apart in time.
#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "../cpu/error.h"
#include "address_state.h"

namespace gacc {
namespace {

class Search {
 public:
  Search(const gacc_address_problem& problem, int64_t max_nodes, bool reorders, const int32_t* stop)
      : state_(problem), max_nodes_(max_nodes), reorders_(reorders), stop_(stop) {}

  int64_t run() {
    items_.resize(state_.num_items());
    std::iota(items_.begin(), items_.end(), 0);
    if (!state_.start()) return GACC_IMPOSSIBLE;
    if (solve_parts(0, state_.num_sections(), 0, items_.size())) return GACC_FOUND;
    return stopped_ ? GACC_STOPPED : GACC_IMPOSSIBLE;
  }

  int64_t nodes() const { return nodes_; }
  const AddressState& state() const { return state_; }

 private:
  // Places items_[begin, end), which live within the sections [lo, hi). Where it returns false, the state is as before,
  // unless the search was stopped.
  bool solve(int lo, int hi, size_t begin, size_t end) {
    const size_t start = state_.mark();
    while (true) {
      if (++nodes_ > max_nodes_ || __atomic_load_n(stop_, __ATOMIC_RELAXED)) {
        stopped_ = true;
        return false;
      }
      const int item = state_.next(items_.data() + begin, items_.data() + end);
      if (item == -1) return true;
      if (item == -2) break;
      const size_t before = state_.mark();
      if (state_.place(item) && solve_rest(item, lo, hi, begin, end)) return true;
      if (stopped_) return false;
      state_.undo(before);
      if (!state_.skip(item)) break;
    }
    state_.undo(start);
    return false;
  }

  bool solve_rest(int placed, int lo, int hi, size_t begin, size_t end) {
    const size_t rest = items_.size();
    for (size_t i = begin; i < end; ++i) {
      if (!state_.is_placed(items_[i])) items_.push_back(items_[i]);
    }
    bool splits = false;
    for (int s = state_.first(placed) + 1; s < state_.last(placed); ++s) splits = splits || state_.is_cut(s);
    const bool solved =
        splits ? solve_parts(lo, hi, rest, items_.size()) : items_.size() == rest || solve(lo, hi, rest, items_.size());
    items_.resize(rest);
    return solved;
  }

  // Solves the independent parts of items_[begin, end), smallest first.
  bool solve_parts(int lo, int hi, size_t begin, size_t end) {
    struct Part {
      int lo, hi;
      std::vector<int> items;
    };
    std::vector<Part> parts;
    for (int s = lo + 1, from = lo; s <= hi; ++s) {
      if (s < hi && !state_.is_cut(s)) continue;
      Part part{from, s, {}};
      for (size_t i = begin; i < end; ++i) {
        if (state_.first(items_[i]) >= from && state_.last(items_[i]) <= s) part.items.push_back(items_[i]);
      }
      if (reorders_) reorder(part.items);
      if (!part.items.empty()) parts.push_back(std::move(part));
      from = s;
    }
    std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.items.size() < b.items.size(); });
    const size_t top = items_.size();
    for (const Part& part : parts) {
      items_.insert(items_.end(), part.items.begin(), part.items.end());
      const bool solved = solve(part.lo, part.hi, top, items_.size());
      items_.resize(top);
      if (!solved) return false;
    }
    return true;
  }

  // Items of the fullest sections first, by what is unplaced in them; the others as they were.
  void reorder(std::vector<int>& items) const {
    std::vector<std::pair<int64_t, int>> keys;
    for (int i : items) keys.push_back({-state_.largest_rest(i), i});
    std::sort(keys.begin(), keys.end());
    for (size_t k = 0; k < keys.size(); ++k) items[k] = keys[k].second;
  }

  AddressState state_;
  std::vector<int> items_;  // a stack of the item lists of the calls in progress
  int64_t max_nodes_, nodes_ = 0;
  bool reorders_;
  const int32_t* stop_;
  bool stopped_ = false;
};

}  // namespace
}  // namespace gacc

int32_t gacc_address_search(const gacc_address_problem* problem, int64_t max_nodes, int32_t reorders, const int32_t* stop,
                            int64_t* offsets, gacc_address_result* result) {
  if (problem->num_items <= 0) return gacc::fail("num_items is %ld, expected at least 1", static_cast<long>(problem->num_items));
  gacc::Search search(*problem, max_nodes, reorders != 0, stop);
  result->outcome = search.run();
  result->nodes = search.nodes();
  if (result->outcome == GACC_FOUND) {
    for (int i = 0; i < problem->num_items; ++i) offsets[i] = search.state().offset(i);
  }
  return 0;
}

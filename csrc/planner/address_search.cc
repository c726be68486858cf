// Depth-first search over placements, split wherever the unplaced items fall apart in time. What has failed once is not searched again.
#include <algorithm>
#include <numeric>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../cpu/error.h"
#include "address_state.h"

namespace gacc {
namespace {

class Search {
 public:
  Search(const gacc_address_problem& problem, int64_t max_nodes, gacc_address_rule rule, const int32_t* stop)
      : state_(problem), weights_(rule == GACC_FAILING ? problem.num_sections : 0, 1.0), max_nodes_(max_nodes), rule_(rule), stop_(stop) {}

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
    const uint64_t key = state_.key(items_.data() + begin, items_.data() + end);
    if (failed_.count(key) != 0) return false;
    const size_t start = state_.mark();
    while (true) {
      if (++nodes_ > max_nodes_ || __atomic_load_n(stop_, __ATOMIC_RELAXED)) {
        stopped_ = true;
        return false;
      }
      const int item = next(lo, hi, begin, end);
      if (item == -1) return true;
      if (item == -2) break;
      const size_t before = state_.mark();
      if (note(state_.place(item)) && solve_rest(item, lo, hi, begin, end)) return true;
      if (stopped_) return false;
      state_.undo(before);
      if (!note(state_.skip(item))) break;
    }
    state_.undo(start);
    failed_.insert(key);
    return false;
  }

  int next(int lo, int hi, size_t begin, size_t end) const {
    const int *first = items_.data() + begin, *last = items_.data() + end;
    if (rule_ == GACC_LOWEST || rule_ == GACC_RENEWED) return state_.next(first, last);
    return state_.next_of_fewest(first, last, lo, hi, weights_.empty() ? nullptr : weights_.data());
  }

  // A section at which the search fails weighs more from then on (Boussemart et al., "Boosting systematic search by weighting constraints", 2004).
  bool note(bool possible) {
    if (!possible && !weights_.empty() && state_.failed_section() >= 0) weights_[state_.failed_section()] += 1;
    return possible;
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
      if (rule_ == GACC_RENEWED) reorder(part.items);
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
  std::unordered_set<uint64_t> failed_;  // keys of states without a solution
  std::vector<double> weights_;          // per section: 1 + failures; empty: not counted
  int64_t max_nodes_, nodes_ = 0;
  gacc_address_rule rule_;
  const int32_t* stop_;
  bool stopped_ = false;
};

}  // namespace
}  // namespace gacc

int32_t gacc_address_search(const gacc_address_problem* problem, int64_t max_nodes, gacc_address_rule rule, const int32_t* stop,
                            int64_t* offsets, gacc_address_result* result) {
  if (problem->num_items <= 0) return gacc::fail("num_items is %ld, expected at least 1", static_cast<long>(problem->num_items));
  gacc::Search search(*problem, max_nodes, rule, stop);
  result->outcome = search.run();
  result->nodes = search.nodes();
  if (result->outcome == GACC_FOUND) {
    for (int i = 0; i < problem->num_items; ++i) offsets[i] = search.state().offset(i);
  }
  return 0;
}

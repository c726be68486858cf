#include "address_state.h"

#include <algorithm>
#include <limits>

namespace gacc {
namespace {
constexpr int64_t kInfinity = std::numeric_limits<int64_t>::max();

int64_t pair_of(int first, int second) { return static_cast<int64_t>(static_cast<uint64_t>(second) << 32 | static_cast<uint32_t>(first)); }
int first_of(int64_t pair) { return static_cast<int32_t>(pair); }
int second_of(int64_t pair) { return static_cast<int32_t>(pair >> 32); }
}  // namespace

uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

AddressState::AddressState(const gacc_address_problem& problem) {
  const int n = static_cast<int>(problem.num_items), sections = static_cast<int>(problem.num_sections);
  members_.resize(sections);
  capacity_.assign(problem.capacity, problem.capacity + sections);
  load_.assign(sections, 0);
  crossing_.assign(sections + 1, 0);
  crossing_rest_.assign(sections + 1, 0);
  starts_.resize(sections + 1);
  ends_.resize(sections + 1);
  for (int i = 0; i < n; ++i) {
    items_.push_back({static_cast<int>(problem.first[i]), static_cast<int>(problem.last[i]), problem.size[i], problem.fixed[i] >= 0});
    top_.push_back(problem.top[i]);
    lowest_.push_back(std::max<int64_t>(problem.fixed[i], 0));
    for (int s = first(i); s < last(i); ++s) {
      members_[s].push_back(i);
      load_[s] += items_[i].size;
      crossing_[s] += s > first(i);
      crossing_rest_[s] += s > first(i) ? items_[i].size : 0;
    }
    starts_[first(i)].push_back(i);
    ends_[last(i)].push_back(i);
  }
  neighbours_.resize(n);
  obstacles_.resize(n);
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) {
      if (i == j || first(i) >= last(j) || first(j) >= last(i)) continue;
      neighbours_[i].push_back(j);
      if (items_[j].is_fixed) obstacles_[i].push_back(j);
    }
    std::sort(obstacles_[i].begin(), obstacles_[i].end(), [&](int x, int y) { return problem.fixed[x] < problem.fixed[y]; });
  }
  infers_windows_ = problem.window_first != nullptr;
  windows_.resize(n);
  for (int64_t k = 0; k < problem.num_windows; ++k) {
    const int i = static_cast<int>(problem.window_first[k]), j = static_cast<int>(problem.window_second[k]);
    windows_[i].push_back({j, problem.window_height[k]});
    windows_[j].push_back({i, problem.window_height[k]});
  }
  rest_ = load_;
  floor_.assign(sections, 0);
  leading_.assign(sections, -1);
  deadline_.assign(n, -1);
  placed_.assign(n, 0);
  is_touched_.assign(sections, 0);
}

bool AddressState::start() {
  for (int i = 0; i < num_items(); ++i) {
    if (!items_[i].is_fixed) lowest_[i] = above_fixed(i, 0);
  }
  for (int s = 0; s < num_sections(); ++s) touch(s);
  for (int i = 0; i < num_items(); ++i) {
    for (const Window& window : windows_[i]) {
      if (!raise(window.other, lowest_[i] + items_[i].size - window.height)) return false;
      if (!lower_top(window.other, top_[i] + window.height - items_[window.other].size)) return false;
    }
  }
  return infer();
}

int AddressState::next(const int* begin, const int* end) const {
  int best = -1;
  int64_t lowest = kInfinity, deadline = kInfinity;
  for (const int* it = begin; it != end; ++it) {
    const int i = *it;
    if (placed_[i]) continue;
    if (lowest_[i] < lowest) {
      lowest = lowest_[i];
      best = i;
    }
    if (deadline_[i] >= 0) deadline = std::min(deadline, deadline_[i]);
  }
  return best >= 0 && deadline <= lowest ? -2 : best;
}

int AddressState::next_of_fewest(const int* begin, const int* end, int lo, int hi, const double* weights) const {
  for (const int* it = begin; it != end; ++it) {
    if (!placed_[*it] && deadline_[*it] >= 0 && !can_be_held_up(*it)) return -2;
  }
  int best = -1;
  double fewest = std::numeric_limits<double>::infinity();
  int64_t least_slack = kInfinity;
  for (int s = lo; s < hi && fewest > 0; ++s) {
    const int64_t latest = capacity_[s] - rest_[s];
    int others = -1, lowest = -1;
    for (int i : members_[s]) {
      if (placed_[i] || lowest_[i] > latest) continue;
      if (lowest < 0 || lowest_[i] < lowest_[lowest]) lowest = i;
      ++others;
    }
    if (lowest < 0) continue;
    const double count = weights == nullptr ? others : others / weights[s];
    const int64_t slack = latest - lowest_[lowest];
    if (count > fewest || (count == fewest && slack >= least_slack)) continue;
    fewest = count;
    least_slack = slack;
    best = lowest;
  }
  for (int below = best; below >= 0;) {
    best = below;
    below = -1;
    for (int j : neighbours_[best]) {
      if (!placed_[j] && lowest_[j] + items_[j].size <= lowest_[best] && (below < 0 || lowest_[j] < lowest_[below])) below = j;
    }
  }
  return best;
}

bool AddressState::can_be_held_up(int item) const {
  const std::vector<int>& others = neighbours_[item];
  return std::any_of(others.begin(), others.end(), [&](int j) { return !placed_[j] && lowest_[j] < deadline_[item]; });
}

bool AddressState::place(int item) {
  const int64_t end = lowest_[item] + items_[item].size;
  bool possible = (items_[item].is_fixed || lowest_[item] <= top_[item]) && lower_across(item);
  placed_[item] = 1;
  trail_.push_back({Kind::kPlaced, item, 0});
  for (int s = first(item); s < last(item); ++s) {
    rest_[s] -= items_[item].size;
    crossing_[s] -= s > first(item);
    crossing_rest_[s] -= s > first(item) ? items_[item].size : 0;
    touch(s);
  }
  for (int j : neighbours_[item]) {
    if (placed_[j]) continue;
    if (deadline_[j] > lowest_[item]) {
      trail_.push_back({Kind::kDeadline, j, deadline_[j]});
      deadline_[j] = -1;
    }
    possible = raise(j, end) && possible;
  }
  possible = lower_top(item, lowest_[item]) && possible;
  return infer() && possible;
}

bool AddressState::skip(int item) {
  if (items_[item].is_fixed) return false;
  const int64_t deadline = lowest_[item] + items_[item].size;
  int64_t support = kInfinity;
  for (int j : neighbours_[item]) {
    if (!placed_[j] && lowest_[j] < deadline) support = std::min(support, lowest_[j] + items_[j].size);
  }
  if (support == kInfinity) return false;
  trail_.push_back({Kind::kDeadline, item, deadline_[item]});
  deadline_[item] = deadline;
  const bool possible = raise(item, support);
  return infer() && possible;
}

int64_t AddressState::largest_rest(int item) const {
  return *std::max_element(rest_.begin() + first(item), rest_.begin() + last(item));
}

int64_t AddressState::above_fixed(int item, int64_t offset) const {
  for (int j : obstacles_[item]) {
    if (placed_[j] || lowest_[j] + items_[j].size <= offset) continue;
    if (lowest_[j] >= offset + items_[item].size) break;
    offset = lowest_[j] + items_[j].size;
  }
  return offset;
}

bool AddressState::raise(int item, int64_t offset) {
  if (offset <= lowest_[item]) return true;
  if (items_[item].is_fixed || placed_[item]) return false;
  offset = above_fixed(item, offset);
  trail_.push_back({Kind::kLowest, item, lowest_[item]});
  lowest_[item] = offset;
  for (int s = first(item); s < last(item); ++s) {
    if (item == first_of(leading_[s]) || item == second_of(leading_[s])) touch(s);
  }
  if (offset > top_[item]) return false;
  for (const Window& window : windows_[item]) {
    if (!raise(window.other, offset + items_[item].size - window.height)) return false;
  }
  return true;
}

// The item lies at most this high; so do those that share a window with it, by the height of the window.
bool AddressState::lower_top(int item, int64_t offset) {
  if (offset >= top_[item]) return true;
  trail_.push_back({Kind::kTop, item, top_[item]});
  top_[item] = offset;
  if (lowest_[item] > offset) return false;
  for (const Window& window : windows_[item]) {
    if (!lower_top(window.other, offset + window.height - items_[window.other].size)) return false;
  }
  if (placed_[item]) return true;
  for (int j : neighbours_[item]) {
    if (!placed_[j] && !order(item, j)) return false;
  }
  return true;
}

// Of two unplaced items that live together one lies above the other: if only one of the two ways is left, it is taken.
bool AddressState::order(int i, int j) {
  const bool above = lowest_[j] + items_[j].size <= top_[i], below = lowest_[i] + items_[i].size <= top_[j];
  if (above && below) return true;
  if (!above && !below) return false;
  if (!above) std::swap(i, j);
  return raise(i, lowest_[j] + items_[j].size) && lower_top(j, top_[i] - items_[j].size);
}

void AddressState::touch(int section) {
  if (is_touched_[section]) return;
  is_touched_[section] = 1;
  touched_.push_back(section);
}

bool AddressState::infer() {
  bool possible = true;
  failed_section_ = -1;
  for (size_t head = 0; head < touched_.size(); ++head) {
    const int section = touched_[head];
    is_touched_[section] = 0;
    if (possible && rest_[section] > 0) possible = infer_section(section);
  }
  touched_.clear();
  return possible;
}

// The first (lowest) unplaced member starts at or below capacity - rest. If only one member can, all others lie above it.
bool AddressState::infer_section(int section) {
  int first = -1, next = -1;
  int64_t lowest = kInfinity, second = kInfinity;
  for (int i : members_[section]) {
    if (placed_[i]) continue;
    if (lowest_[i] < lowest) {
      second = lowest;
      next = first;
      lowest = lowest_[i];
      first = i;
    } else if (lowest_[i] < second) {
      second = lowest_[i];
      next = i;
    }
  }
  const int64_t leading = pair_of(first, next);
  if (leading != leading_[section]) {
    trail_.push_back({Kind::kLeading, section, leading_[section]});
    leading_[section] = leading;
  }
  if (lowest != floor_[section]) {
    trail_.push_back({Kind::kFloor, section, floor_[section]});
    floor_[section] = lowest;
  }
  const int64_t latest = capacity_[section] - rest_[section];
  if (lowest > latest) {
    failed_section_ = section;
    return false;
  }
  bool possible = true;
  if (second > latest && second != kInfinity) {
    for (int i : members_[section]) {
      if (!placed_[i] && i != first) possible = raise(i, lowest + items_[first].size) && possible;
    }
  }
  return possible && infer_boundary(section) && infer_boundary(section + 1);
}

// The height that the unplaced items of both section - 1 and section leave to the others of either.
int64_t AddressState::gaps(int section) const {
  return std::max(capacity_[section - 1], capacity_[section]) - std::min(floor_[section - 1], floor_[section]) - crossing_rest_[section];
}

// The windows of unplaced items that end and start at a section, by what is known now.
bool AddressState::infer_boundary(int section) {
  if (!infers_windows_ || section <= 0 || section >= num_sections()) return true;
  const int64_t height = gaps(section);
  for (int i : ends_[section]) {
    if (placed_[i]) continue;
    for (int j : starts_[section]) {
      if (placed_[j] || items_[i].size + items_[j].size <= height) continue;
      if (!raise(i, lowest_[j] + items_[j].size - height) || !raise(j, lowest_[i] + items_[i].size - height)) return false;
    }
  }
  return true;
}

// What shares a window with an item that is about to be placed lies at most so high above it.
bool AddressState::lower_across(int item) {
  for (int section : {first(item), last(item)}) {
    if (!infers_windows_ || section <= 0 || section >= num_sections()) continue;
    const int64_t height = gaps(section);
    for (int j : section == first(item) ? ends_[section] : starts_[section]) {
      if (placed_[j] || items_[item].size + items_[j].size <= height) continue;
      if (!lower_top(j, lowest_[item] + height - items_[j].size)) return false;
    }
  }
  return true;
}

void AddressState::undo(size_t mark) {
  for (; trail_.size() > mark; trail_.pop_back()) {
    const Change& change = trail_.back();
    switch (change.kind) {
      case Kind::kLowest: lowest_[change.index] = change.before; break;
      case Kind::kTop: top_[change.index] = change.before; break;
      case Kind::kDeadline: deadline_[change.index] = change.before; break;
      case Kind::kFloor: floor_[change.index] = change.before; break;
      case Kind::kLeading: leading_[change.index] = change.before; break;
      case Kind::kPlaced:
        placed_[change.index] = 0;
        for (int s = first(change.index); s < last(change.index); ++s) {
          rest_[s] += items_[change.index].size;
          crossing_[s] += s > first(change.index);
          crossing_rest_[s] += s > first(change.index) ? items_[change.index].size : 0;
        }
    }
  }
}

void AddressState::save(Snapshot& snapshot) const {
  snapshot.lowest = lowest_;
  snapshot.top = top_;
  snapshot.deadline = deadline_;
  snapshot.floor = floor_;
  snapshot.leading = leading_;
  snapshot.rest = rest_;
  snapshot.placed = placed_;
  snapshot.crossing_rest = crossing_rest_;
}

void AddressState::restore(const Snapshot& snapshot) {
  lowest_ = snapshot.lowest;
  top_ = snapshot.top;
  deadline_ = snapshot.deadline;
  floor_ = snapshot.floor;
  leading_ = snapshot.leading;
  rest_ = snapshot.rest;
  placed_ = snapshot.placed;
  crossing_rest_ = snapshot.crossing_rest;
  trail_.clear();  // crossing_ is not restored: a beam does not decompose
}

double AddressState::waste(const std::vector<double>& weights) const {
  double waste = 0;
  for (int s = 0; s < num_sections(); ++s) {
    if (rest_[s] > 0) waste += weights[s] * static_cast<double>(floor_[s] - load_[s] + rest_[s]);
  }
  return waste;
}

uint64_t AddressState::key(const int* begin, const int* end) const {
  uint64_t key = 0;
  for (const int* it = begin; it != end; ++it) {
    if (!placed_[*it]) key += mix(mix(mix(static_cast<uint64_t>(*it)) + static_cast<uint64_t>(lowest_[*it])) + static_cast<uint64_t>(deadline_[*it] + 1));
  }
  return key;
}

uint64_t AddressState::hash(const std::vector<uint64_t>& keys) const {
  uint64_t hash = 0;
  for (int i = 0; i < num_items(); ++i) {
    if (!placed_[i]) hash += keys[i] * (2 * static_cast<uint64_t>(lowest_[i]) + 1);
  }
  return hash;
}

}  // namespace gacc

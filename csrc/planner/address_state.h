// A partial assignment of addresses, with inference and undo. The mathematics is in passes/memory/addresses/__init__.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner.h"

namespace gacc {

class AddressState {
 public:
  explicit AddressState(const gacc_address_problem& problem);

  int num_items() const { return static_cast<int>(items_.size()); }
  int num_sections() const { return static_cast<int>(members_.size()); }
  bool is_placed(int item) const { return placed_[item]; }
  int64_t offset(int item) const { return lowest_[item]; }
  int first(int item) const { return items_[item].first; }
  int last(int item) const { return items_[item].last; }
  // Size of the unplaced items of the fullest section that the item lives in.
  int64_t largest_rest(int item) const;
  bool is_cut(int section) const { return crossing_[section] == 0; }  // no unplaced item lives in section - 1 and in section

  // Infers from the untouched problem; false: it has no solution.
  bool start();
  // The unplaced item of the list that is to be decided next, -1 if all are placed, or -2 if there is no solution.
  int next(const int* begin, const int* end) const;
  // The same for a list of all items that live within the sections [lo, hi): the lowest of the section of which the fewest items can
  // be the lowest unplaced one, or what can lie below it. `weights`: per section, counts are divided by them; null: by 1.
  int next_of_fewest(const int* begin, const int* end, int lo, int hi, const double* weights) const;
  // Gives the item its lowest offset. False: no solution follows.
  bool place(int item);
  // Decides that the item lies above its lowest offset. False: no solution follows.
  bool skip(int item);

  size_t mark() const { return trail_.size(); }
  void undo(size_t mark);

  // What a beam keeps of a state.
  struct Snapshot {
    std::vector<int64_t> lowest, top, deadline, floor, leading, rest, crossing_rest;
    std::vector<char> placed;
  };
  void save(Snapshot& snapshot) const;
  void restore(const Snapshot& snapshot);
  // Of the unplaced items of a list and what is known of them: what is left to decide.
  uint64_t key(const int* begin, const int* end) const;
  // The section at which the last inference failed, or -1.
  int failed_section() const { return failed_section_; }
  double waste(const std::vector<double>& weights) const;
  uint64_t hash(const std::vector<uint64_t>& keys) const;
  int64_t slack(int section) const { return capacity_[section] - load_[section]; }

 private:
  struct Item {
    int first, last;
    int64_t size;
    bool is_fixed;
  };
  struct Window {
    int other;
    int64_t height;
  };
  enum class Kind : char { kLowest, kTop, kDeadline, kFloor, kLeading, kPlaced };
  struct Change {
    Kind kind;
    int index;
    int64_t before;
  };

  bool can_be_held_up(int item) const;
  bool raise(int item, int64_t offset);
  bool lower_top(int item, int64_t offset);
  bool order(int i, int j);
  bool infer();
  bool infer_section(int section);
  bool infer_boundary(int section);
  bool lower_across(int item);
  int64_t gaps(int section) const;
  void touch(int section);
  int64_t above_fixed(int item, int64_t offset) const;

  std::vector<Item> items_;
  std::vector<std::vector<int>> members_;     // of a section
  std::vector<std::vector<int>> neighbours_;  // items that live at the same time
  std::vector<std::vector<int>> obstacles_;   // fixed neighbours, by offset
  std::vector<std::vector<Window>> windows_;  // of an item
  bool infers_windows_ = false;
  std::vector<int64_t> capacity_, load_;

  std::vector<int64_t> lowest_;    // no solution has the item lower; its offset once it is placed
  std::vector<int64_t> top_;       // no solution has the item higher
  std::vector<int64_t> deadline_;  // -1, or: a neighbour must be placed below this offset to hold the skipped item up
  std::vector<int64_t> floor_;     // smallest lowest_ of the unplaced members
  std::vector<int64_t> leading_;   // the unplaced members with the smallest lowest_ and the second smallest, or -1; a section is read again only when these change
  std::vector<int64_t> rest_;      // total size of the unplaced members
  std::vector<int> crossing_;
  std::vector<int64_t> crossing_rest_;           // total size of the unplaced items that live in section - 1 and in section
  std::vector<std::vector<int>> starts_, ends_;  // the items that live in section and not in section - 1, and the other way round
  std::vector<char> placed_;
  std::vector<Change> trail_;
  std::vector<int> touched_;
  std::vector<char> is_touched_;
  int failed_section_ = -1;
};

uint64_t mix(uint64_t x);  // splitmix64

}  // namespace gacc

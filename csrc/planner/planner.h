// The C ABI of the memory planner's inner loops. Part of libgraphacc_cpu; conventions as in gacc.h.
//
// Items are numbered by rank: of two items with the same lowest offset, the one with the smaller index goes first.
// Sections are the maximal sets of items that live at the same time, in order of time; an item lives in [first, last).
#pragma once

#include "gacc.h"

struct gacc_address_problem {
  int64_t num_items;
  int64_t num_sections;
  const int64_t* first;
  const int64_t* last;
  const int64_t* size;      // positive
  const int64_t* fixed;     // the offset that the item must get; -1: free
  const int64_t* top;       // the largest offset that the item may get
  const int64_t* capacity;  // per section: the items of the section end at or below it
  int64_t num_windows;
  const int64_t* window_first;   // two items that do not live together; null: no windows are inferred in the search either
  const int64_t* window_second;
  const int64_t* window_height;  // in every solution the larger end of the two less the smaller offset is at most this
};

// Which item a search decides next, of those that nothing unplaced can lie below.
enum gacc_address_rule : int32_t {
  GACC_LOWEST = 0,    // the lowest, the smaller index of equals
  GACC_RENEWED = 1,   // the same; where the problem splits, items of the sections with the most left to place come first in each part
  GACC_FEWEST = 2,    // the lowest of the section of which the fewest items can be the lowest
  GACC_FAILING = 3,   // the same, sections at which the search has failed often before others
};

enum gacc_address_outcome : int64_t { GACC_FOUND = 0, GACC_IMPOSSIBLE = 1, GACC_STOPPED = 2 };

struct gacc_address_result {
  int64_t outcome;
  int64_t nodes;  // of the search tree
};

// Places the item with the lowest possible offset next, until all are placed. Ignores top and capacity.
GACC_API int32_t gacc_address_skyline(const gacc_address_problem* problem, int64_t* offsets);

// Places the items in the order of their indices, each as low as it can lie above those placed before.
GACC_API int32_t gacc_address_settle(const gacc_address_problem* problem, int64_t* offsets);

// Depth-first search for offsets that respect top and capacity. GACC_IMPOSSIBLE is a proof that there are none.
// Stops after max_nodes, or soon after *stop becomes other than 0.
GACC_API int32_t gacc_address_search(const gacc_address_problem* problem, int64_t max_nodes, gacc_address_rule rule, const int32_t* stop,
                                     int64_t* offsets, gacc_address_result* result);

// The same by a beam of the `width` states with the least waste per level. A section's waste counts in inverse proportion
// to its slack plus bias * capacity. GACC_IMPOSSIBLE proves nothing.
GACC_API int32_t gacc_address_beam(const gacc_address_problem* problem, int64_t width, double bias, const int32_t* stop,
                                   int64_t* offsets, gacc_address_result* result);

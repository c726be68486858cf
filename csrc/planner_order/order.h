// The C ABI of the order planner's search and of its minimum cuts. Part of libgraphacc_cpu; conventions as in gacc.h.
//
// Lists of lists are given as their ends and their items: list i is items[ends[i - 1] .. ends[i]), with ends[-1] = 0.
#pragma once

#include "gacc.h"

// An operator graph as graphacc/passes/memory/order/graph.py defines it.
struct gacc_order_graph {
  int64_t num_operators;
  int64_t num_buffers;
  int64_t start_bytes;       // live before the first operator
  const int64_t* created;    // per operator: bytes that it creates
  const int64_t* workspace;  // per operator: bytes that live only while it runs
  const int64_t* rank;       // per operator: of states that are alike, those that ran low ranks first are kept
  const int64_t* size;       // per buffer
  const int64_t* lasting;    // per buffer: 1 if it lives to the end
  const int64_t* pred_ends;
  const int64_t* preds;
  const int64_t* succ_ends;
  const int64_t* succs;
  const int64_t* touched_ends;  // per operator: the buffers that it touches
  const int64_t* touched;
  const int64_t* access_ends;  // per buffer: all operators that touch it
  const int64_t* accesses;
};

enum gacc_order_outcome : int64_t {
  GACC_ORDER_FOUND = 0,
  GACC_ORDER_IMPOSSIBLE = 1,  // a proof: no state was ever dropped
  GACC_ORDER_LOST = 2,        // every state that was kept ran into the threshold
  GACC_ORDER_STOPPED = 3,     // out of time
};

// Looks for an order whose memory never exceeds `threshold`, by a beam of `width` downsets per number of operators.
// Writes the outcome, and the order after GACC_ORDER_FOUND.
GACC_API int32_t gacc_order_beam(const gacc_order_graph* graph, int64_t threshold, int64_t width, double seconds,
                                 int64_t* outcome, int64_t* order);

// A flow network over node 0 (the source), node 1 (the sink), num_operators nodes, and others.
struct gacc_flow_network {
  int64_t num_nodes;
  int64_t num_operators;
  int64_t num_arcs;
  const int32_t* tails;  // per arc
  const int32_t* heads;
  const int64_t* sizes;  // capacities; their sum along any cut is below 2^63
};

// The minimum cut with the operators of `inside` on the source's side and those of `outside` on the sink's: (num_operators + 7) / 8
// bytes each, operator v is bit v % 8 of byte v / 8; no operator is in both. Writes its size, or where that is more than `limit`
// some number that is; and into `source_side`, which may be null and else is zeroed before, the smallest source's side without `inside`.
GACC_API int32_t gacc_min_cut(const gacc_flow_network* network, const uint8_t* inside, const uint8_t* outside, int64_t limit,
                              int64_t* value, uint8_t* source_side);

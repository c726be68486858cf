// Threshold search over downsets: see graphacc/passes/memory/order/search.py for the rules, which are the same there.
//
// Layer k holds the downsets of k operators that are reached without exceeding the threshold. A ready operator that fits
// and frees at least what it creates is run alone, since that costs nothing whatever follows.
#include "order.h"

#include <algorithm>
#include <chrono>
#include <unordered_map>
#include <vector>

#include "../cpu/error.h"

namespace {

struct List {
  const int64_t* begin_;
  const int64_t* end_;
  const int64_t* begin() const { return begin_; }
  const int64_t* end() const { return end_; }
};

List list(const int64_t* ends, const int64_t* items, int64_t i) { return {items + (i ? ends[i - 1] : 0), items + ends[i]}; }

struct State {
  std::vector<uint64_t> done;
  std::vector<int32_t> ready;
  int64_t live;
  int64_t lateness;  // sum of the ranks of what ran
  uint64_t hash;
};

struct Move {
  int32_t parent;
  int32_t op;
  int64_t live;
  int64_t lateness;
  uint64_t hash;
};

struct Step {
  int32_t parent;
  int32_t op;
};

uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

class Beam {
 public:
  Beam(const gacc_order_graph& graph, int64_t threshold, int64_t width, double seconds)
      : g(graph), threshold(threshold), width(width), deadline(Clock::now() + to_duration(seconds)) {}

  int64_t run(int64_t* order) {
    std::vector<State> layer{first()};
    for (int64_t count = 0; count < g.num_operators; ++count) {
      if (Clock::now() > deadline) return GACC_ORDER_STOPPED;
      std::vector<Move> moves = all_moves(layer);
      layer = follow(layer, moves);
      if (layer.empty()) return dropped ? GACC_ORDER_LOST : GACC_ORDER_IMPOSSIBLE;
    }
    write(order);
    return GACC_ORDER_FOUND;
  }

 private:
  using Clock = std::chrono::steady_clock;

  static Clock::duration to_duration(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

  static bool has(const std::vector<uint64_t>& set, int64_t v) { return set[v >> 6] >> (v & 63) & 1; }

  State first() const {
    State state{std::vector<uint64_t>((g.num_operators + 63) / 64), {}, g.start_bytes, 0, 0};
    for (int64_t v = 0; v < g.num_operators; ++v)
      if (list(g.pred_ends, g.preds, v).begin() == list(g.pred_ends, g.preds, v).end()) state.ready.push_back(v);
    return state;
  }

  bool dies_with(const State& state, int64_t buffer, int64_t v) const {
    if (g.lasting[buffer]) return false;
    for (int64_t u : list(g.access_ends, g.accesses, buffer))
      if (u != v && !has(state.done, u)) return false;
    return true;
  }

  int64_t live_after(const State& state, int64_t v) const {
    int64_t live = state.live + g.created[v];
    for (int64_t buffer : list(g.touched_ends, g.touched, v))
      if (dies_with(state, buffer, v)) live -= g.size[buffer];
    return live;
  }

  std::vector<Move> all_moves(const std::vector<State>& layer) const {
    std::vector<Move> moves;
    for (size_t i = 0; i < layer.size(); ++i) add_moves(layer[i], static_cast<int32_t>(i), moves);
    return moves;
  }

  void add_moves(const State& state, int32_t index, std::vector<Move>& moves) const {
    const size_t begin = moves.size();
    for (int32_t v : state.ready) {
      if (state.live + g.created[v] + g.workspace[v] > threshold) continue;
      const Move move{index, v, live_after(state, v), state.lateness + g.rank[v] * (g.num_operators - ran), state.hash ^ mix(v)};
      if (move.live <= state.live) {
        moves.resize(begin);
        moves.push_back(move);
        return;
      }
      moves.push_back(move);
    }
  }

  // The states after the best `width` different moves.
  std::vector<State> follow(const std::vector<State>& layer, std::vector<Move>& moves) {
    std::sort(moves.begin(), moves.end(), [](const Move& a, const Move& b) {
      return a.live != b.live ? a.live < b.live : a.lateness != b.lateness ? a.lateness < b.lateness : a.hash < b.hash;
    });
    std::vector<State> next;
    std::unordered_multimap<uint64_t, size_t> seen;
    history.emplace_back();
    for (const Move& move : moves) {
      if (static_cast<int64_t>(next.size()) == width) {
        dropped = true;
        break;
      }
      State state = after(layer[move.parent], move);
      const auto same = seen.equal_range(move.hash);
      if (std::any_of(same.first, same.second, [&](const auto& item) { return next[item.second].done == state.done; })) continue;
      seen.emplace(move.hash, next.size());
      next.push_back(std::move(state));
      history.back().push_back({move.parent, move.op});
    }
    ++ran;
    return next;
  }

  State after(const State& parent, const Move& move) const {
    State state{parent.done, {}, move.live, move.lateness, move.hash};
    state.done[move.op >> 6] |= uint64_t{1} << (move.op & 63);
    state.ready.reserve(parent.ready.size() + 4);
    for (int32_t v : parent.ready)
      if (v != move.op) state.ready.push_back(v);
    for (int64_t u : list(g.succ_ends, g.succs, move.op)) {
      const List before = list(g.pred_ends, g.preds, u);
      if (std::all_of(before.begin(), before.end(), [&](int64_t p) { return has(state.done, p); })) state.ready.push_back(u);
    }
    return state;
  }

  void write(int64_t* order) const {
    int32_t at = 0;
    for (int64_t k = g.num_operators; k-- > 0;) {
      order[k] = history[k][at].op;
      at = history[k][at].parent;
    }
  }

  const gacc_order_graph& g;
  const int64_t threshold, width;
  const Clock::time_point deadline;
  int64_t ran = 0;
  bool dropped = false;
  std::vector<std::vector<Step>> history;
};

}  // namespace

int32_t gacc_order_beam(const gacc_order_graph* graph, int64_t threshold, int64_t width, double seconds, int64_t* outcome,
                        int64_t* order) {
  const long long count = graph->num_operators;
  if (count < 0 || count > INT32_MAX) return gacc::fail("num_operators is %lld, it must be in [0, 2^31)", count);
  if (width < 1) return gacc::fail("the width of the beam is %lld, it must be positive", static_cast<long long>(width));
  *outcome = Beam(*graph, threshold, width, seconds).run(order);
  return 0;
}

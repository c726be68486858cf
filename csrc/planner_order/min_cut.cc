// Minimum cuts by Dinic's algorithm (Dinic, 1970): flow along shortest augmenting paths, one blocking flow per length. The
// networks of an order problem are wide and their cuts lie near the source or the sink, so few lengths occur (3 or 4).
#include <algorithm>
#include <vector>

#include "order.h"

#include "../cpu/error.h"

namespace {

constexpr int32_t SOURCE = 0, SINK = 1;

class Network {
 public:
  // The given network with all nodes of `inside` merged into the source and all of `outside` into the sink.
  Network(const gacc_flow_network& given, const uint8_t* inside, const uint8_t* outside)
      : first(given.num_nodes + 1), level(given.num_nodes), at(given.num_nodes), node(given.num_nodes) {
    for (int32_t v = 0; v < given.num_nodes; ++v) node[v] = v;
    for (int64_t v = 0; v < given.num_operators; ++v)
      if (has(inside, v))
        node[v + 2] = SOURCE;
      else if (has(outside, v))
        node[v + 2] = SINK;
    to.reserve(2 * given.num_arcs);
    left.reserve(2 * given.num_arcs);
    for (int64_t a = 0; a < given.num_arcs; ++a) {
      const int32_t tail = node[given.tails[a]], head = node[given.heads[a]];
      if (tail == head || tail == SINK || head == SOURCE) continue;
      to.push_back(head);
      to.push_back(tail);
      left.push_back(given.sizes[a]);
      left.push_back(0);
      ++first[tail + 1];
      ++first[head + 1];
    }
    for (size_t v = 1; v < first.size(); ++v) first[v] += first[v - 1];
    arcs.resize(to.size());
    std::copy(first.begin(), first.end() - 1, at.begin());
    for (size_t a = 0; a < to.size(); ++a) arcs[at[to[a ^ 1]]++] = static_cast<int32_t>(a);
  }

  // The largest flow, or the first one found that is more than `limit`.
  int64_t flow(int64_t limit) {
    int64_t total = 0;
    while (total <= limit && find_levels()) total += block(limit - total);
    return total;
  }

  // After `flow`: the operators that the source still reaches, as bits; merged ones are left out.
  void source_side(int64_t num_operators, uint8_t* bits) const {
    std::vector<int32_t> queue{SOURCE};
    std::vector<char> seen(level.size());
    seen[SOURCE] = 1;
    while (!queue.empty()) {
      const int32_t v = queue.back();
      queue.pop_back();
      if (v >= 2 && v < num_operators + 2) bits[(v - 2) >> 3] |= 1 << ((v - 2) & 7);
      for (int32_t i = first[v]; i < first[v + 1]; ++i)
        if (const int32_t a = arcs[i]; left[a] > 0 && !seen[to[a]]) {
          seen[to[a]] = 1;
          queue.push_back(to[a]);
        }
    }
  }

 private:
  static bool has(const uint8_t* bits, int64_t v) { return bits[v >> 3] >> (v & 7) & 1; }

  // The number of arcs from each node to the sink, as far as they are needed; whether the source has a way.
  bool find_levels() {
    std::fill(level.begin(), level.end(), -1);
    level[SINK] = 0;
    std::vector<int32_t>& queue = node;  // no longer needed
    size_t end = 0;
    queue[end++] = SINK;
    for (size_t next = 0; next < end && level[SOURCE] < 0; ++next) {
      const int32_t v = queue[next];
      for (int32_t i = first[v]; i < first[v + 1]; ++i)
        if (const int32_t a = arcs[i], u = to[a]; level[u] < 0 && left[a ^ 1] > 0) {
          level[u] = level[v] + 1;
          queue[end++] = u;
        }
    }
    return level[SOURCE] >= 0;
  }

  // Flow along shortest paths until there is none, or until it is more than `limit`.
  int64_t block(int64_t limit) {
    int64_t total = 0;
    std::copy(first.begin(), first.end() - 1, at.begin());
    path.clear();
    for (int32_t v = SOURCE;;) {
      if (v == SINK) {
        v = augment(total);
        if (total > limit) return total;
      } else if (at[v] == first[v + 1]) {
        if (v == SOURCE) return total;
        v = to[path.back() ^ 1];
        path.pop_back();
        ++at[v];
      } else if (const int32_t a = arcs[at[v]]; left[a] > 0 && level[to[a]] == level[v] - 1) {
        path.push_back(a);
        v = to[a];
      } else {
        ++at[v];
      }
    }
  }

  // Fills the path, adds its flow to `total`, and goes back to the tail of its first full arc.
  int32_t augment(int64_t& total) {
    int64_t room = INT64_MAX;
    for (int32_t a : path) room = std::min(room, left[a]);
    size_t full = path.size();
    for (size_t i = path.size(); i-- > 0;) {
      left[path[i]] -= room;
      left[path[i] ^ 1] += room;
      if (left[path[i]] == 0) full = i;
    }
    total += room;
    const int32_t tail = to[path[full] ^ 1];
    path.resize(full);
    return tail;
  }

  std::vector<int32_t> first, level, at, node;  // per node; its arcs, those into it reversed, are arcs[first[v] .. first[v + 1])
  std::vector<int32_t> arcs, to, path;          // arc a ^ 1 is arc a reversed
  std::vector<int64_t> left;                    // per arc: capacity that is left
};

}  // namespace

int32_t gacc_min_cut(const gacc_flow_network* network, const uint8_t* inside, const uint8_t* outside, int64_t limit, int64_t* value,
                     uint8_t* source_side) {
  const long long nodes = network->num_nodes, arcs = network->num_arcs;
  if (nodes < network->num_operators + 2 || nodes > INT32_MAX) return gacc::fail("the network has %lld nodes", nodes);
  if (arcs < 0 || arcs > INT32_MAX / 2) return gacc::fail("the network has %lld arcs", arcs);
  Network cut(*network, inside, outside);
  *value = cut.flow(limit);
  if (source_side) cut.source_side(network->num_operators, source_side);
  return 0;
}

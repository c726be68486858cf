// Compiled several times, with GACC_ISA naming the instruction set; as in kernels.cc, no C++ header is included and
// everything is in an unnamed namespace.
//
// A tile of scores is kept transposed, [keys][queries] in panels, with the queries in the lanes of the vectors: maxima and sums over
// the keys are then vertical. The right factors of all products are in panels, packed once per tile of queries; keys beyond a causal
// bound are left out panel by panel.
#include "flash_math.h"

namespace {

using gacc::FlashBackward;
using gacc::FlashRange;

// One tile of scores: keys [key, key + num_keys) against queries [query, query + num_queries), for one head.

struct Tile {
  const gacc_attention& at;
  int64_t batch, head, query, num_queries, key = 0, num_keys = 0;

  Tile(const gacc_attention& at, int64_t batch, int64_t head, int64_t query)
      : at(at), batch(batch), head(head), query(query), num_queries(smaller(query_tile, at.q_len - query)) {}

  void move_to(int64_t first) {
    key = first;
    num_keys = smaller(key_tile, last_key() - first);
  }
  // The sizes of the matrices, with zeros beyond the queries and keys.
  int64_t padded_queries() const { return round_up(num_queries, panel); }
  int64_t padded_keys() const { return round_up(num_keys, rows); }

  // The keys that some query of the tile may see: [first_key, last_key).
  int64_t first_key() const {
    const int64_t first = at.left < 0 ? 0 : query - at.left;
    return first <= 0 ? 0 : first / key_tile * key_tile;
  }
  int64_t last_key() const {
    const int64_t last = at.right < 0 ? at.kv_len : query + num_queries + at.right;
    return last < at.kv_len ? last : at.kv_len;
  }
  // Of the tile's keys, how many come before the first that queries [t, t + panel) of the tile may not see.
  int64_t visible(int64_t t) const {
    const int64_t count = at.right < 0 ? num_keys : smaller(num_keys, query + t + panel + at.right - key);
    return count < 0 ? 0 : count;
  }
  // How many queries come before the first that sees one of the tile's keys, in whole panels.
  int64_t hidden() const {
    int64_t t = 0;
    while (t < num_queries && !visible(t)) t += panel;
    return t;
  }
  bool inside_band(int64_t t) const {
    return (at.right < 0 || key + num_keys - 1 <= query + t + at.right) && (at.left < 0 || key >= query + t + panel - 1 - at.left);
  }
  int64_t kv_head() const { return head / (at.heads / at.kv_heads); }
  int64_t query_row(int64_t t) const { return (batch * at.heads + head) * at.q_len + t; }
  int64_t key_row(int64_t s) const { return (batch * at.kv_heads + kv_head()) * at.kv_len + s; }
  int64_t bias_at(int64_t t, int64_t s) const {
    const int64_t* stride = at.bias_strides;
    return batch * stride[0] + head * stride[1] + t * stride[2] + s * stride[3];
  }
};

// Calls visit(pointer to `lanes` scores, first query, key) for the visible scores of queries [first, first + panel).
template <typename Visit>
inline void for_each(const Tile& tile, int64_t first, float* scores, const Visit& visit) {
  for (int64_t s = 0, visible = tile.visible(first); s < visible; ++s) {
    for (int64_t t = first; t < first + panel; t += lanes, scores += lanes) visit(scores, t, s);
  }
}

void add_bias(const Tile& tile, int64_t first, float* scores) {
  const int64_t visible = tile.visible(first), stride = tile.at.bias_strides[3];
  for (int64_t t = first; t < smaller(first + panel, tile.num_queries); ++t) {
    const float* bias = tile.at.bias + tile.bias_at(tile.query + t, tile.key);
    for (int64_t s = 0; s < visible; ++s) scores[s * panel + t - first] += bias[s * stride];
  }
}

inline Ints iota(int32_t first) {
  Ints value{};
  for (int i = 0; i < lanes; ++i) value[i] = first + i;
  return value;
}

void mask_band(const Tile& tile, int64_t first, float* scores) {
  const int64_t far = int64_t{1} << 30;  // positions fit into 30 bits (checked by the caller)
  const int32_t left = static_cast<int32_t>(tile.at.left < 0 || tile.at.left > far ? far : tile.at.left);
  const int32_t right = static_cast<int32_t>(tile.at.right < 0 || tile.at.right > far ? far : tile.at.right);
  for_each(tile, first, scores, [&](float* score, int64_t t, int64_t s) {
    const Ints ahead = static_cast<int32_t>(tile.key + s) - iota(static_cast<int32_t>(tile.query + t));
    store(score, ((ahead <= right) & (ahead >= -left)) ? load(score) : splat(-infinity));
  });
}

void mask_segments(const Tile& tile, int64_t first, float* scores) {
  alignas(64) int32_t queries[panel] = {};
  const int64_t end = smaller(first + panel, tile.num_queries);
  for (int64_t t = first; t < end; ++t) queries[t - first] = tile.at.q_segments[tile.batch * tile.at.q_len + tile.query + t];
  const int32_t* keys = tile.at.kv_segments + tile.batch * tile.at.kv_len + tile.key;
  for_each(tile, first, scores, [&](float* score, int64_t t, int64_t s) {
    store(score, *reinterpret_cast<const Ints*>(queries + t - first) == keys[s] ? load(score) : splat(-infinity));
  });
}

// The visible scores of queries [first, first + panel), with masked ones at -infinity. `queries` are scaled, [dim][queries].
void score(const Tile& tile, int64_t first, const Rows& keys, const Panels& queries, float* scores) {
  const int64_t dim = queries.height, count = round_up(tile.visible(first), rows);
  multiply<wide, false, false>(count, Left(keys, dim), dim, queries.at(first), scores);
  if (tile.at.bias) add_bias(tile, first, scores);
  if (!tile.inside_band(first)) mask_band(tile, first, scores);
  if (tile.at.q_segments) mask_segments(tile, first, scores);
}

// Dropout: threefry-2x32 of the element's index in the global [B, H, T, S], as graphacc/ops/random.py.

struct Threefry {
  uint32_t keys[3];

  Threefry(uint32_t key0, uint32_t key1) : keys{key0, key1, key0 ^ key1 ^ 0x1bd11bdau} {}

  template <typename Word>
  void operator()(Word& x0, Word& x1) const {
    constexpr int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    x0 += keys[0];
    x1 += keys[1];
    for (int block = 0; block < 5; ++block) {
      for (int i = 0; i < 4; ++i) {
        const int by = rotations[block % 2][i];
        x0 += x1;
        x1 = ((x1 << by) | (x1 >> (32 - by))) ^ x0;
      }
      x0 += keys[(block + 1) % 3];
      x1 += keys[(block + 2) % 3] + static_cast<uint32_t>(block + 1);
    }
  }
};

struct Dropout {
  Threefry threefry;
  uint32_t threshold;  // of the upper 24 bits: smaller ones are dropped
  float factor;        // of the others

  static Threefry derive(const gacc_attention& at) {
    uint32_t x0 = static_cast<uint32_t>(at.stream), x1 = static_cast<uint32_t>(static_cast<uint64_t>(at.stream) >> 32);
    Threefry(at.key[0], at.key[1])(x0, x1);
    return Threefry(x0, x1);
  }

  explicit Dropout(const gacc_attention& at)
      : threefry(derive(at)),
        threshold(static_cast<uint32_t>(__builtin_ceil(static_cast<double>(at.dropout) * 16777216.0))),
        factor(at.dropout < 1.0f ? static_cast<float>(1.0 / (1.0 - static_cast<double>(at.dropout))) : 1.0f) {}

  // 0 or `factor` for queries t .. t + lanes of key s.
  Floats operator()(const Tile& tile, int64_t t, int64_t s) const {
    const int64_t *start = tile.at.start, *size = tile.at.global_size;
    const uint64_t row = (tile.batch + start[0]) * size[1] + tile.head + start[1];
    Words x0{}, x1{};
    for (int i = 0; i < lanes; ++i) {
      const uint64_t index = (row * size[2] + t + i + start[2]) * size[3] + s + start[3];
      x0[i] = static_cast<uint32_t>(index >> 32);
      x1[i] = static_cast<uint32_t>(index);
    }
    threefry(x0, x1);
    return ((x0 ^ x1) >> 8) < threshold ? Floats{} : splat(factor);
  }
};

void drop(const Tile& tile, int64_t first, const Dropout& dropout, float* probabilities) {
  for_each(tile, first, probabilities, [&](float* p, int64_t t, int64_t s) {
    store(p, load(p) * dropout(tile, tile.query + t, tile.key + s));
  });
}

// The rows of the tile's queries in an array of them, in fp32 and padded with zeros: [queries][columns].
void read_query_rows(const Tile& tile, const void* array, int64_t size, int64_t columns, float* to) {
  for (int64_t t = 0; t < tile.num_queries; ++t) {
    read_row(array, tile.at.dtype, tile.query_row(tile.query + t) * size, size, columns, to + t * columns);
  }
  fill(to + tile.num_queries * columns, (tile.padded_queries() - tile.num_queries) * columns, 0.0f);
}

// Forward

// The online softmax of one panel: scores become exp(score - largest), and the sums so far are rescaled where `largest` has grown.
void soften(int64_t num_keys, float* scores, float* largest, float* total, int64_t value_dim, float* sums) {
  Floats base[wide], sum[wide], factor[wide];
  bool grown = false;
  for (int j = 0; j < wide; ++j) base[j] = load(largest + j * lanes);
  for (int64_t s = 0; s < num_keys; ++s) {
    for (int j = 0; j < wide; ++j) base[j] = larger(base[j], load(scores + s * panel + j * lanes));
  }
  for (int j = 0; j < wide; ++j) {
    const Floats before = load(largest + j * lanes), now = base[j];
    store(largest + j * lanes, now);
    base[j] = now == -infinity ? Floats{} : now;
    factor[j] = exponential(before - base[j]);
    sum[j] = load(total + j * lanes) * factor[j];
    for (int i = 0; i < lanes; ++i) grown |= factor[j][i] != 1.0f;
  }
  for (int64_t s = 0; s < num_keys; ++s) {
    for (int j = 0; j < wide; ++j) {
      float* score = scores + s * panel + j * lanes;
      const Floats p = exponential(load(score) - base[j]);
      store(score, p);
      sum[j] += p;
    }
  }
  for (int j = 0; j < wide; ++j) store(total + j * lanes, sum[j]);
  for (int64_t e = 0; grown && e < value_dim; ++e) {
    for (int j = 0; j < wide; ++j) store(sums + e * panel + j * lanes, load(sums + e * panel + j * lanes) * factor[j]);
  }
}

// A row whose keys are all masked by finite values: the softmax is uniform over all keys.
void attend_uniformly(const Tile& tile, const Dropout& dropout, int64_t t, int64_t padded, float* value, float* out) {
  const gacc_attention& at = tile.at;
  for (int64_t e = 0; e < at.value_dim; ++e) out[e] = 0.0f;
  for (int64_t s = 0; s < at.kv_len; ++s) {
    read_row(at.v, at.dtype, tile.key_row(s) * at.value_dim, at.value_dim, padded, value);
    const float p = (at.dropout > 0.0f ? dropout(tile, t, s)[0] : 1.0f) / static_cast<float>(at.kv_len);
    for (int64_t e = 0; e < at.value_dim; ++e) out[e] += p * value[e];
  }
}

void forward(const gacc_attention& at, int64_t batch, int64_t head, int64_t index, void* out, float* lse, float* scratch) {
  const int64_t dim = round_up(at.head_dim, 16), value_dim = round_up(at.value_dim, 16);
  Tile tile(at, batch, head, index * query_tile);
  const Dropout dropout(at);
  const int64_t padded = tile.padded_queries();
  const Panels queries{scratch, dim, padded};
  const Panels sums{queries.data + dim * query_tile, value_dim, padded};
  float* scores = sums.data + value_dim * query_tile;  // [keys][panel]
  float* key_rows = scores + key_tile * panel;
  float* value_rows = key_rows + key_tile * (dim + 16);
  alignas(64) float largest[query_tile], total[query_tile];
  fill(largest, query_tile, -infinity);
  fill(total, query_tile, 0.0f);
  fill(sums.data, value_dim * padded, 0.0f);
  read_query_rows(tile, at.q, at.head_dim, dim, key_rows);
  scale(key_rows, padded * dim, at.scale);
  pack_transposed({key_rows, dim}, queries);

  for (int64_t key = tile.first_key(); key < tile.last_key(); key += key_tile) {
    tile.move_to(key);
    const int64_t row = tile.key_row(key);
    const Rows keys = read_rows(at.k, at.dtype, row * at.head_dim, tile.num_keys, at.head_dim, dim, key_rows);
    const Rows values = copy_rows(at.v, at.dtype, row * at.value_dim, tile.num_keys, at.value_dim, value_dim, value_rows);
    for (int64_t t = tile.hidden(); t < padded; t += panel) {
      const int64_t visible = tile.visible(t);
      score(tile, t, keys, queries, scores);
      soften(visible, scores, largest + t, total + t, value_dim, sums.at(t));
      if (at.dropout > 0.0f) drop(tile, t, dropout, scores);
      multiply<wide, true, true>(value_dim, Left(values, visible), visible, scores, sums.at(t));
    }
  }

  for (int64_t t = 0; t < tile.num_queries; ++t) {
    float* result = value_rows;
    const int64_t row = tile.query_row(tile.query + t);
    unpack_column(sums, t, total[t] == 0.0f ? 1.0f : 1.0f / total[t], result);
    if (total[t] == 0.0f && at.empty_rows != GACC_ZEROS) {
      attend_uniformly(tile, dropout, tile.query + t, value_dim, key_rows, result);
    }
    write_row(out, at.dtype, row * at.value_dim, at.value_dim, result);
    lse[row] = total[t] == 0.0f ? -infinity : largest[t] + __builtin_logf(total[t]);
  }
}

// Backward

// A query tile's operands, and the gradient of its queries.
struct Queries {
  Panels rows, columns;                 // scaled: [queries][dim], [dim][queries]
  Panels grad_rows, grad_columns;       // of the output: [queries][value_dim], [value_dim][queries]
  Panels grad;                          // [dim][queries]
  alignas(64) float lse[query_tile];    // +infinity in rows without a key, so that their probabilities are 0
  alignas(64) float delta[query_tile];  // sum of grad * out over the row
  alignas(64) float norm[query_tile];   // factor on the probabilities, not 1 only in rows that `normalise` sees

  Queries(int64_t dim, int64_t value_dim, int64_t padded, float* scratch)
      : rows{scratch, padded, dim},
        columns{rows.data + query_tile * dim, dim, padded},
        grad_rows{columns.data + query_tile * dim, padded, value_dim},
        grad_columns{grad_rows.data + query_tile * value_dim, value_dim, padded},
        grad{grad_columns.data + query_tile * value_dim, dim, padded} {}

  float* end() const { return grad.data + query_tile * grad.height; }
};

// `row_buffer` has room for one row more than the tile's queries.
void read_queries(const Tile& tile, const FlashBackward& io, float* row_buffer, Queries& q) {
  const gacc_attention& at = tile.at;
  const int64_t padded = q.grad.columns, dim = q.rows.columns, value_dim = q.grad_rows.columns;
  read_query_rows(tile, at.q, at.head_dim, dim, row_buffer);
  scale(row_buffer, padded * dim, at.scale);
  pack({row_buffer, dim}, q.rows);
  pack_transposed({row_buffer, dim}, q.columns);
  fill(q.grad.data, dim * padded, 0.0f);

  read_query_rows(tile, io.grad, at.value_dim, value_dim, row_buffer);
  pack({row_buffer, value_dim}, q.grad_rows);
  pack_transposed({row_buffer, value_dim}, q.grad_columns);
  float* out = row_buffer + padded * value_dim;
  fill(q.lse, query_tile, infinity);
  fill(q.delta, query_tile, 0.0f);
  fill(q.norm, query_tile, 1.0f);
  for (int64_t t = 0; t < tile.num_queries; ++t) {
    const int64_t row = tile.query_row(tile.query + t);
    if (io.lse[row] != -infinity) q.lse[t] = io.lse[row];
    read_row(io.out, at.dtype, row * at.value_dim, at.value_dim, value_dim, out);
    Floats delta{};
    for (int64_t e = 0; e < value_dim; e += lanes) delta += load(row_buffer + t * value_dim + e) * load(out + e);
    for (int i = 0; i < lanes; ++i) q.delta[t] += delta[i];
  }
}

// From scores and the gradient of the dropped probabilities to dropped probabilities and the gradient of the scores, in place.
template <bool kDropout>
void differentiate(const Tile& tile, int64_t first, const Dropout& dropout, const Queries& q, float* scores, float* grads) {
  const int64_t apart = grads - scores;
  for_each(tile, first, scores, [&](float* score, int64_t t, int64_t s) {
    float* grad = score + apart;
    const Floats p = exponential(load(score) - load(q.lse + t)) * load(q.norm + t), delta = load(q.delta + t);
    if (kDropout) {
      const Floats kept = dropout(tile, tile.query + t, tile.key + s);
      store(score, p * kept);
      store(grad, p * (load(grad) * kept - delta));
    } else {
      store(score, p);
      store(grad, p * (load(grad) - delta));
    }
  });
  const int64_t begin = tile.visible(first) * panel, count = tile.padded_keys() * panel - begin;
  fill(scores + begin, count, 0.0f);
  fill(grads + begin, count, 0.0f);
}

// A log-sum-exp of large magnitude has lost the digits that say among how many keys the row is shared; with finite masks, where
// it is the lowest number, all of them. Its probabilities are summed up again.
void normalise(Tile tile, float* key_rows, float* scores, Queries& q) {
  const gacc_attention& at = tile.at;
  const float large = 1e3f;  // as LARGE in graphacc/ops/flash_attention.py
  bool any = false;
  for (int64_t t = 0; t < tile.num_queries; ++t) any |= q.lse[t] != infinity && __builtin_fabsf(q.lse[t]) > large;
  if (!any) return;
  alignas(64) float total[query_tile] = {};
  for (int64_t key = tile.first_key(); key < tile.last_key(); key += key_tile) {
    tile.move_to(key);
    const int64_t row = tile.key_row(key) * at.head_dim;
    const Rows keys = read_rows(at.k, at.dtype, row, tile.num_keys, at.head_dim, q.columns.height, key_rows);
    for (int64_t first = 0; first < q.columns.columns; first += panel) {
      score(tile, first, keys, q.columns, scores);
      for_each(tile, first, scores, [&](const float* score, int64_t t, int64_t) {
        store(total + t, load(total + t) + exponential(load(score) - load(q.lse + t)));
      });
    }
  }
  for (int64_t t = 0; t < tile.num_queries; ++t) {
    if (q.lse[t] != infinity && __builtin_fabsf(q.lse[t]) > large) q.norm[t] = 1.0f / total[t];
  }
}

void add_to_bias(const Tile& tile, int64_t first, const Panels& grads, float* grad_bias) {
  for (int64_t t = first; t < tile.num_queries; ++t) {
    float* to = grad_bias + tile.bias_at(tile.query + t, tile.key);
    for (int64_t s = 0; s < tile.num_keys; ++s) to[s * tile.at.bias_strides[3]] += grads(s, t);
  }
}

// The gradient of all keys or values of a head, in fp32: a tile of keys is one matrix of panels.
struct KeyGrads {
  float* data;
  int64_t columns;

  Panels tile(int64_t key) const { return {data + key / key_tile * key_tile * columns, key_tile, columns}; }
};

// What `attend_uniformly` did for row t of the tile, backward.
void differentiate_uniformly(const Tile& tile, const Dropout& dropout, int64_t t, float* key_row, float* value_row,
                             const KeyGrads& grad_k, const KeyGrads& grad_v, float* grad_bias, const Queries& q) {
  const gacc_attention& at = tile.at;
  const int64_t dim = grad_k.columns, value_dim = grad_v.columns;
  for (int64_t s = 0; s < at.kv_len; ++s) {
    read_row(at.k, at.dtype, tile.key_row(s) * at.head_dim, at.head_dim, dim, key_row);
    read_row(at.v, at.dtype, tile.key_row(s) * at.value_dim, at.value_dim, value_dim, value_row);
    const float kept = at.dropout > 0.0f ? dropout(tile, tile.query + t, s)[0] : 1.0f, p = 1.0f / static_cast<float>(at.kv_len);
    float grad_p = 0.0f;
    for (int64_t e = 0; e < value_dim; ++e) {
      grad_p += q.grad_rows(t, e) * value_row[e];
      grad_v.tile(s)(s % key_tile, e) += p * kept * q.grad_rows(t, e);
    }
    const float grad_s = p * (grad_p * kept - q.delta[t]);
    for (int64_t d = 0; d < dim; ++d) {
      q.grad(d, t) += grad_s * key_row[d];
      grad_k.tile(s)(s % key_tile, d) += grad_s * q.rows(t, d);
    }
    if (grad_bias && at.empty_rows == GACC_UNIFORM) grad_bias[tile.bias_at(tile.query + t, s)] += grad_s;
  }
}

// A tile of queries against all its keys.
void backward_tile(Tile tile, const FlashBackward& io, const Dropout& dropout, const KeyGrads& grad_k, const KeyGrads& grad_v,
                   float* scratch) {
  const gacc_attention& at = tile.at;
  const int64_t dim = grad_k.columns, value_dim = grad_v.columns, padded = tile.padded_queries();
  Queries q(dim, value_dim, padded, scratch);
  const Panels scores{q.end(), key_tile, padded}, grads{scores.data + key_tile * query_tile, key_tile, padded};
  float* key_rows = grads.data + key_tile * query_tile;
  float* value_rows = key_rows + key_tile * (dim + 16);
  read_queries(tile, io, key_rows, q);
  normalise(tile, key_rows, scores.data, q);
  for (int64_t key = tile.first_key(); key < tile.last_key(); key += key_tile) {
    tile.move_to(key);
    const int64_t row = tile.key_row(key);
    const Rows keys = copy_rows(at.k, at.dtype, row * at.head_dim, tile.num_keys, at.head_dim, dim, key_rows);
    const Rows values = read_rows(at.v, at.dtype, row * at.value_dim, tile.num_keys, at.value_dim, value_dim, value_rows);
    const int64_t hidden = tile.hidden();
    for (int64_t t = hidden; t < padded; t += panel) {
      const int64_t visible = tile.visible(t);
      score(tile, t, keys, q.columns, scores.at(t));
      multiply<wide, false, false>(round_up(visible, rows), Left(values, value_dim), value_dim, q.grad_columns.at(t), grads.at(t));
      at.dropout > 0.0f ? differentiate<true>(tile, t, dropout, q, scores.at(t), grads.at(t))
                        : differentiate<false>(tile, t, dropout, q, scores.at(t), grads.at(t));
      multiply<wide, true, true>(dim, Left(keys, visible), visible, grads.at(t), q.grad.at(t));
    }
    add_product(tile.padded_keys(), scores, hidden, q.grad_rows, grad_v.tile(key));
    add_product(tile.padded_keys(), grads, hidden, q.rows, grad_k.tile(key));
    if (io.grad_bias) add_to_bias(tile, hidden, grads, io.grad_bias);
  }
  for (int64_t t = 0; t < tile.num_queries; ++t) {
    const int64_t row = tile.query_row(tile.query + t);
    if (at.empty_rows != GACC_ZEROS && io.lse[row] == -infinity) {
      differentiate_uniformly(tile, dropout, t, key_rows, value_rows, grad_k, grad_v, io.grad_bias, q);
    }
    unpack_column(q.grad, t, at.scale, key_rows);
    write_row(io.grad_q, at.dtype, row * at.head_dim, at.head_dim, key_rows);
  }
}

void write_key_grads(const KeyGrads& grads, const gacc_attention& at, int64_t first_row, int64_t size, void* to, float* row_buffer) {
  for (int64_t s = 0; s < at.kv_len; ++s) {
    unpack_row(grads.tile(s), s % key_tile, row_buffer);
    write_row(to, at.dtype, (first_row + s) * size, size, row_buffer);
  }
}

void backward(const gacc_attention& at, const FlashBackward& io, const FlashRange& range, float* scratch) {
  const int64_t dim = round_up(at.head_dim, 16), value_dim = round_up(at.value_dim, 16), group = at.heads / at.kv_heads;
  const int64_t padded_keys = round_up(at.kv_len, key_tile);
  const KeyGrads grad_k{scratch, dim}, grad_v{scratch + padded_keys * dim, value_dim};
  float* rest = grad_v.data + padded_keys * value_dim;
  const Dropout dropout(at);
  for (int64_t batch = range.batch_begin; batch < range.batch_end; ++batch) {
    for (int64_t kv = range.kv_begin; kv < range.kv_end; ++kv) {
      fill(scratch, padded_keys * (dim + value_dim), 0.0f);
      for (int64_t head = kv * group; head < (kv + 1) * group; ++head) {
        for (int64_t query = 0; query < at.q_len; query += query_tile) {
          backward_tile(Tile(at, batch, head, query), io, dropout, grad_k, grad_v, rest);
        }
      }
      const int64_t first_row = (batch * at.kv_heads + kv) * at.kv_len;
      write_key_grads(grad_k, at, first_row, at.head_dim, io.grad_k, rest);
      write_key_grads(grad_v, at, first_row, at.value_dim, io.grad_v, rest);
    }
  }
}

}  // namespace

#define GACC_JOIN_(a, b) a##b
#define GACC_JOIN(a, b) GACC_JOIN_(a, b)

const gacc::FlashKernels gacc::GACC_JOIN(flash_, GACC_ISA) = {forward, backward};

// Compiled several times, with GACC_ISA naming the instruction set; as in kernels.cc, no C++ header is included and
// everything is in an unnamed namespace.
//
// A tile of scores is kept transposed, [keys][queries], with the queries in the lanes of the vectors: maxima and sums over the keys
// are then vertical, and each of the products below is one call of `multiply`, which reads its left factor in any strides.
#include "flash_math.h"

namespace {

using gacc::FlashBackward;
using gacc::FlashRange;

// One tile of scores: keys [key, key + num_keys) against queries [query, query + num_queries), for one head.

struct Tile {
  const gacc_attention& at;
  int64_t batch, head, query, num_queries, key = 0, num_keys = 0;

  // The keys that some query of the tile may see: [first_key, last_key).
  int64_t first_key() const {
    const int64_t first = at.left < 0 ? 0 : query - at.left;
    return first <= 0 ? 0 : first / flash_tile * flash_tile;
  }
  int64_t last_key() const {
    const int64_t last = at.right < 0 ? at.kv_len : query + num_queries + at.right;
    return last < at.kv_len ? last : at.kv_len;
  }
  bool inside_band() const {
    return (at.right < 0 || key + num_keys - 1 <= query + at.right) && (at.left < 0 || key >= query + num_queries - 1 - at.left);
  }
  int64_t kv_head() const { return head / (at.heads / at.kv_heads); }
  int64_t query_row(int64_t t) const { return (batch * at.heads + head) * at.q_len + t; }
  int64_t key_row(int64_t s) const { return (batch * at.kv_heads + kv_head()) * at.kv_len + s; }
  int64_t bias_at(int64_t t, int64_t s) const {
    const int64_t* stride = at.bias_strides;
    return batch * stride[0] + head * stride[1] + t * stride[2] + s * stride[3];
  }
};

void add_bias(const Tile& tile, float* scores) {
  for (int64_t t = 0; t < tile.num_queries; ++t) {
    const float* bias = tile.at.bias + tile.bias_at(tile.query + t, tile.key);
    for (int64_t s = 0; s < tile.num_keys; ++s) scores[s * flash_tile + t] += bias[s * tile.at.bias_strides[3]];
  }
}

inline Ints iota(int32_t first) {
  Ints value{};
  for (int i = 0; i < lanes; ++i) value[i] = first + i;
  return value;
}

void mask_band(const Tile& tile, float* scores) {
  const int64_t far = int64_t{1} << 30;  // positions fit into 30 bits (checked by the caller)
  const int32_t left = static_cast<int32_t>(tile.at.left < 0 || tile.at.left > far ? far : tile.at.left);
  const int32_t right = static_cast<int32_t>(tile.at.right < 0 || tile.at.right > far ? far : tile.at.right);
  for (int64_t s = 0; s < tile.num_keys; ++s) {
    for (int64_t t = 0; t < flash_tile; t += lanes) {
      const Ints ahead = static_cast<int32_t>(tile.key + s) - iota(static_cast<int32_t>(tile.query + t));
      float* at = scores + s * flash_tile + t;
      store(at, ((ahead <= right) & (ahead >= -left)) ? load(at) : splat(-infinity));
    }
  }
}

void mask_segments(const Tile& tile, float* scores) {
  alignas(64) int32_t queries[flash_tile] = {};
  for (int64_t t = 0; t < tile.num_queries; ++t) queries[t] = tile.at.q_segments[tile.batch * tile.at.q_len + tile.query + t];
  for (int64_t s = 0; s < tile.num_keys; ++s) {
    const int32_t segment = tile.at.kv_segments[tile.batch * tile.at.kv_len + tile.key + s];
    for (int64_t t = 0; t < flash_tile; t += lanes) {
      float* at = scores + s * flash_tile + t;
      store(at, *reinterpret_cast<const Ints*>(queries + t) == segment ? load(at) : splat(-infinity));
    }
  }
}

// Scores [num_keys][flash_tile] of the tile, with masked positions at -infinity. `queries` are scaled, [head_dim][flash_tile].
void score(const Tile& tile, const float* keys, int64_t padded, const float* queries, float* scores) {
  multiply<false>(round_up(tile.num_keys, rows), flash_tile, tile.at.head_dim, keys, padded, 1, queries, flash_tile, scores,
                  flash_tile);
  if (tile.at.bias) add_bias(tile, scores);
  if (!tile.inside_band()) mask_band(tile, scores);
  if (tile.at.q_segments) mask_segments(tile, scores);
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

void drop(const Tile& tile, const Dropout& dropout, float* probabilities) {
  for (int64_t s = 0; s < tile.num_keys; ++s) {
    for (int64_t t = 0; t < flash_tile; t += lanes) {
      float* at = probabilities + s * flash_tile + t;
      store(at, load(at) * dropout(tile, tile.query + t, tile.key + s));
    }
  }
}

// Forward

// The online softmax of one column of vectors: scores become exp(score - largest), the running maximum and sum are updated, and
// what was summed up before has to be multiplied by the returned factor.
inline Floats soften(float* scores, int64_t num_keys, float* largest, float* total) {
  const Floats before = load(largest);
  Floats now = before;
  for (int64_t s = 0; s < num_keys; ++s) now = larger(now, load(scores + s * flash_tile));
  const Floats base = now == -infinity ? Floats{} : now;
  const Floats factor = exponential(before - base);
  Floats sum = load(total) * factor;
  for (int64_t s = 0; s < num_keys; ++s) {
    const Floats p = exponential(load(scores + s * flash_tile) - base);
    store(scores + s * flash_tile, p);
    sum += p;
  }
  store(largest, now);
  store(total, sum);
  return factor;
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
  const int64_t dim = round_up(at.head_dim, 16), value_dim = round_up(at.value_dim, 16), query = index * flash_tile;
  Tile tile{at, batch, head, query, at.q_len - query < flash_tile ? at.q_len - query : flash_tile};
  const Dropout dropout(at);
  float* queries = scratch;                              // [dim][flash_tile]
  float* sums = queries + dim * flash_tile;              // [value_dim][flash_tile]
  float* scores = sums + value_dim * flash_tile;         // [keys][flash_tile]
  float* key_rows = scores + flash_tile * flash_tile;    // [keys][dim]
  float* value_rows = key_rows + flash_tile * dim;       // [keys][value_dim]
  alignas(64) float largest[flash_tile], total[flash_tile];
  for (int64_t t = 0; t < flash_tile; ++t) largest[t] = -infinity, total[t] = 0.0f;
  for (int64_t i = 0; i < value_dim * flash_tile; ++i) sums[i] = 0.0f;

  for (int64_t t = 0; t < tile.num_queries; ++t) {
    read_row(at.q, at.dtype, tile.query_row(query + t) * at.head_dim, at.head_dim, dim, key_rows + t * dim);
  }
  scale_rows(key_rows, tile.num_queries * dim, at.scale);
  transpose(key_rows, tile.num_queries, dim, queries);

  for (tile.key = tile.first_key(); tile.key < tile.last_key(); tile.key += flash_tile) {
    tile.num_keys = tile.last_key() - tile.key < flash_tile ? tile.last_key() - tile.key : flash_tile;
    const int64_t row = tile.key_row(tile.key);
    const float* keys = read_rows(at.k, at.dtype, row * at.head_dim, tile.num_keys, at.head_dim, dim, key_rows);
    score(tile, keys, dim, queries, scores);
    alignas(64) float factors[flash_tile];
    for (int64_t t = 0; t < flash_tile; t += lanes) store(factors + t, soften(scores + t, tile.num_keys, largest + t, total + t));
    for (int64_t e = 0; e < value_dim; ++e) {
      for (int64_t t = 0; t < flash_tile; t += lanes) {
        float* sum = sums + e * flash_tile + t;
        store(sum, load(sum) * load(factors + t));
      }
    }
    if (at.dropout > 0.0f) drop(tile, dropout, scores);
    const float* values = read_rows(at.v, at.dtype, row * at.value_dim, tile.num_keys, at.value_dim, value_dim, value_rows);
    multiply<true>(value_dim, flash_tile, tile.num_keys, values, 1, value_dim, scores, flash_tile, sums, flash_tile);
  }

  for (int64_t t = 0; t < tile.num_queries; ++t) {
    float* result = value_rows;
    const int64_t row = tile.query_row(query + t);
    const float inverse = total[t] == 0.0f ? 1.0f : 1.0f / total[t];
    for (int64_t e = 0; e < at.value_dim; ++e) result[e] = sums[e * flash_tile + t] * inverse;
    if (total[t] == 0.0f && at.empty_rows != GACC_ZEROS) attend_uniformly(tile, dropout, query + t, value_dim, key_rows, result);
    write_row(out, at.dtype, row * at.value_dim, at.value_dim, result);
    lse[row] = total[t] == 0.0f ? -infinity : largest[t] + __builtin_logf(total[t]);
  }
}

// Backward

// A query tile's operands, and the gradient of its queries.
struct Queries {
  float *rows, *columns;            // scaled: [flash_tile][dim], [dim][flash_tile]
  float *grad_rows, *grad_columns;  // of the output: [flash_tile][value_dim], [value_dim][flash_tile]
  float* grad;                      // [dim][flash_tile]
  float lse[flash_tile];            // +infinity in rows without a key, so that their probabilities are 0
  float delta[flash_tile];          // sum of grad * out over the row
  float norm[flash_tile];           // factor on the probabilities, not 1 only in rows that `normalise` sees
};

void read_queries(const Tile& tile, const FlashBackward& io, int64_t dim, int64_t value_dim, float* row_buffer, Queries& q) {
  const gacc_attention& at = tile.at;
  for (int64_t t = 0; t < flash_tile; ++t) {
    const bool real = t < tile.num_queries;
    const int64_t row = tile.query_row(tile.query + t);
    float *q_row = q.rows + t * dim, *grad_row = q.grad_rows + t * value_dim;
    read_row(at.q, at.dtype, real ? row * at.head_dim : 0, real ? at.head_dim : 0, dim, q_row);
    read_row(io.grad, at.dtype, real ? row * at.value_dim : 0, real ? at.value_dim : 0, value_dim, grad_row);
    read_row(io.out, at.dtype, real ? row * at.value_dim : 0, real ? at.value_dim : 0, value_dim, row_buffer);
    q.lse[t] = real && io.lse[row] != -infinity ? io.lse[row] : infinity;
    Floats delta{};
    for (int64_t e = 0; e < value_dim; e += lanes) delta += load(grad_row + e) * load(row_buffer + e);
    q.delta[t] = 0.0f, q.norm[t] = 1.0f;
    for (int i = 0; i < lanes; ++i) q.delta[t] += delta[i];
  }
  scale_rows(q.rows, flash_tile * dim, at.scale);
  transpose(q.rows, flash_tile, dim, q.columns);
  transpose(q.grad_rows, flash_tile, value_dim, q.grad_columns);
  for (int64_t i = 0; i < dim * flash_tile; ++i) q.grad[i] = 0.0f;
}

// From scores and the gradient of the dropped probabilities to dropped probabilities and the gradient of the scores, in place.
void differentiate(const Tile& tile, const Dropout& dropout, const Queries& q, float* scores, float* grads) {
  for (int64_t s = 0; s < tile.num_keys; ++s) {
    for (int64_t t = 0; t < flash_tile; t += lanes) {
      float *score = scores + s * flash_tile + t, *grad = grads + s * flash_tile + t;
      const Floats p = exponential(load(score) - load(q.lse + t)) * load(q.norm + t), delta = load(q.delta + t);
      if (tile.at.dropout > 0.0f) {
        const Floats kept = dropout(tile, tile.query + t, tile.key + s);
        store(score, p * kept);
        store(grad, p * (load(grad) * kept - delta));
      } else {
        store(score, p);
        store(grad, p * (load(grad) - delta));
      }
    }
  }
  for (int64_t i = tile.num_keys * flash_tile; i < round_up(tile.num_keys, rows) * flash_tile; ++i) scores[i] = grads[i] = 0.0f;
}

// A log-sum-exp of large magnitude has lost the digits that say among how many keys the row is shared; with finite masks, where
// it is the lowest number, all of them. Its probabilities are summed up again.
void normalise(Tile tile, int64_t dim, float* key_rows, float* scores, Queries& q) {
  const float large = 1e3f;  // as LARGE in graphacc/ops/flash_attention.py
  bool any = false;
  for (int64_t t = 0; t < tile.num_queries; ++t) any |= q.lse[t] != infinity && __builtin_fabsf(q.lse[t]) > large;
  if (!any) return;
  alignas(64) float total[flash_tile] = {};
  for (tile.key = tile.first_key(); tile.key < tile.last_key(); tile.key += flash_tile) {
    tile.num_keys = tile.last_key() - tile.key < flash_tile ? tile.last_key() - tile.key : flash_tile;
    const int64_t row = tile.key_row(tile.key);
    const float* keys = read_rows(tile.at.k, tile.at.dtype, row * tile.at.head_dim, tile.num_keys, tile.at.head_dim, dim, key_rows);
    score(tile, keys, dim, q.columns, scores);
    for (int64_t s = 0; s < tile.num_keys; ++s) {
      for (int64_t t = 0; t < flash_tile; t += lanes) {
        store(total + t, load(total + t) + exponential(load(scores + s * flash_tile + t) - load(q.lse + t)));
      }
    }
  }
  for (int64_t t = 0; t < tile.num_queries; ++t) {
    if (q.lse[t] != infinity && __builtin_fabsf(q.lse[t]) > large) q.norm[t] = 1.0f / total[t];
  }
}

void add_to_bias(const Tile& tile, const float* grads, float* grad_bias) {
  for (int64_t t = 0; t < tile.num_queries; ++t) {
    float* to = grad_bias + tile.bias_at(tile.query + t, tile.key);
    for (int64_t s = 0; s < tile.num_keys; ++s) to[s * tile.at.bias_strides[3]] += grads[s * flash_tile + t];
  }
}

// What `attend_uniformly` did for row t of the tile, backward.
void differentiate_uniformly(const Tile& tile, const Dropout& dropout, int64_t t, int64_t dim, int64_t value_dim, float* key_row,
                             float* value_row, float* grad_k, float* grad_v, float* grad_bias, Queries& q) {
  const gacc_attention& at = tile.at;
  const float* grad_row = q.grad_rows + t * value_dim;
  for (int64_t s = 0; s < at.kv_len; ++s) {
    read_row(at.k, at.dtype, tile.key_row(s) * at.head_dim, at.head_dim, dim, key_row);
    read_row(at.v, at.dtype, tile.key_row(s) * at.value_dim, at.value_dim, value_dim, value_row);
    const float kept = at.dropout > 0.0f ? dropout(tile, tile.query + t, s)[0] : 1.0f, p = 1.0f / static_cast<float>(at.kv_len);
    float grad_p = 0.0f;
    for (int64_t e = 0; e < value_dim; ++e) {
      grad_p += grad_row[e] * value_row[e];
      grad_v[s * value_dim + e] += p * kept * grad_row[e];
    }
    const float grad_s = p * (grad_p * kept - q.delta[t]);
    for (int64_t d = 0; d < dim; ++d) {
      q.grad[d * flash_tile + t] += grad_s * key_row[d];
      grad_k[s * dim + d] += grad_s * q.rows[t * dim + d];
    }
    if (grad_bias && at.empty_rows == GACC_UNIFORM) grad_bias[tile.bias_at(tile.query + t, s)] += grad_s;
  }
}

void write_grad_queries(const Tile& tile, int64_t dim, const Queries& q, void* grad_q, float* row_buffer) {
  for (int64_t t = 0; t < tile.num_queries; ++t) {
    for (int64_t d = 0; d < dim; ++d) row_buffer[d] = q.grad[d * flash_tile + t] * tile.at.scale;
    write_row(grad_q, tile.at.dtype, tile.query_row(tile.query + t) * tile.at.head_dim, tile.at.head_dim, row_buffer);
  }
}

void backward_head(Tile tile, const FlashBackward& io, const Dropout& dropout, float* grad_k, float* grad_v, float* scratch) {
  const gacc_attention& at = tile.at;
  const int64_t dim = round_up(at.head_dim, 16), value_dim = round_up(at.value_dim, 16);
  Queries q;
  q.rows = scratch;
  q.columns = q.rows + flash_tile * dim;
  q.grad = q.columns + flash_tile * dim;
  q.grad_rows = q.grad + flash_tile * dim;
  q.grad_columns = q.grad_rows + flash_tile * value_dim;
  float* scores = q.grad_columns + flash_tile * value_dim;
  float* grads = scores + flash_tile * flash_tile;
  float* key_rows = grads + flash_tile * flash_tile;
  float* value_rows = key_rows + flash_tile * dim;
  for (tile.query = 0; tile.query < at.q_len; tile.query += flash_tile) {
    tile.num_queries = at.q_len - tile.query < flash_tile ? at.q_len - tile.query : flash_tile;
    read_queries(tile, io, dim, value_dim, value_rows, q);
    normalise(tile, dim, key_rows, scores, q);
    for (tile.key = tile.first_key(); tile.key < tile.last_key(); tile.key += flash_tile) {
      tile.num_keys = tile.last_key() - tile.key < flash_tile ? tile.last_key() - tile.key : flash_tile;
      const int64_t row = tile.key_row(tile.key), padded_keys = round_up(tile.num_keys, rows);
      const float* keys = read_rows(at.k, at.dtype, row * at.head_dim, tile.num_keys, at.head_dim, dim, key_rows);
      const float* values = read_rows(at.v, at.dtype, row * at.value_dim, tile.num_keys, at.value_dim, value_dim, value_rows);
      score(tile, keys, dim, q.columns, scores);
      multiply<false>(padded_keys, flash_tile, value_dim, values, value_dim, 1, q.grad_columns, flash_tile, grads, flash_tile);
      differentiate(tile, dropout, q, scores, grads);
      multiply<true>(padded_keys, value_dim, flash_tile, scores, flash_tile, 1, q.grad_rows, value_dim,
                     grad_v + tile.key * value_dim, value_dim);
      multiply<true>(padded_keys, dim, flash_tile, grads, flash_tile, 1, q.rows, dim, grad_k + tile.key * dim, dim);
      multiply<true>(dim, flash_tile, tile.num_keys, keys, 1, dim, grads, flash_tile, q.grad, flash_tile);
      if (io.grad_bias) add_to_bias(tile, grads, io.grad_bias);
    }
    if (at.empty_rows != GACC_ZEROS) {
      for (int64_t t = 0; t < tile.num_queries; ++t) {
        if (q.lse[t] == infinity && io.lse[tile.query_row(tile.query + t)] == -infinity) {
          differentiate_uniformly(tile, dropout, t, dim, value_dim, key_rows, value_rows, grad_k, grad_v, io.grad_bias, q);
        }
      }
    }
    write_grad_queries(tile, dim, q, io.grad_q, key_rows);
  }
}

void backward(const gacc_attention& at, const FlashBackward& io, const FlashRange& range, float* scratch) {
  const int64_t dim = round_up(at.head_dim, 16), value_dim = round_up(at.value_dim, 16), group = at.heads / at.kv_heads;
  const int64_t padded_keys = round_up(at.kv_len, rows);
  float* grad_k = scratch;                      // [keys][dim]
  float* grad_v = grad_k + padded_keys * dim;   // [keys][value_dim]
  float* rest = grad_v + padded_keys * value_dim;
  const Dropout dropout(at);
  for (int64_t batch = range.batch_begin; batch < range.batch_end; ++batch) {
    for (int64_t kv = range.kv_begin; kv < range.kv_end; ++kv) {
      for (int64_t i = 0; i < padded_keys * (dim + value_dim); ++i) grad_k[i] = 0.0f;
      for (int64_t head = kv * group; head < (kv + 1) * group; ++head) {
        backward_head(Tile{at, batch, head, 0, 0}, io, dropout, grad_k, grad_v, rest);
      }
      for (int64_t s = 0; s < at.kv_len; ++s) {
        const int64_t row = (batch * at.kv_heads + kv) * at.kv_len + s;
        write_row(io.grad_k, at.dtype, row * at.head_dim, at.head_dim, grad_k + s * dim);
        write_row(io.grad_v, at.dtype, row * at.value_dim, at.value_dim, grad_v + s * value_dim);
      }
    }
  }
}

}  // namespace

#define GACC_JOIN_(a, b) a##b
#define GACC_JOIN(a, b) GACC_JOIN_(a, b)

const gacc::FlashKernels gacc::GACC_JOIN(flash_, GACC_ISA) = {forward, backward};

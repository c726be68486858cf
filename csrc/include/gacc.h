// The C ABI of libgraphacc_cpu: host memory only, callable from any thread, from Python through ctypes.
//
// Functions that can fail return 0 or -1; after -1, gacc_last_error() of the same thread says why.
// Change GACC_ABI_VERSION, here and in graphacc/kernels/library.py, whenever a signature or a struct changes.
#pragma once

#include <stdint.h>

#define GACC_ABI_VERSION 8
#define GACC_API extern "C" __attribute__((visibility("default")))

enum gacc_dtype : int32_t { GACC_NONE = 0, GACC_F32 = 1, GACC_BF16 = 2, GACC_F16 = 3, GACC_F64 = 4 };

// The hyperparameters of one parameter group, as torch.optim.AdamW names them.
struct gacc_adam_group {
  double lr, beta1, beta2, eps, weight_decay;
  int32_t decoupled;  // 1: AdamW's decay of the parameter; 0: Adam's L2 term in the gradient
  int32_t maximize;
};

// One dense parameter with its state. All arrays hold `numel` elements and must not overlap.
struct gacc_adam_tensor {
  float* param;
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;  // null without amsgrad
  const void* grad;
  void* copy;             // receives the new values as `copy_dtype`; null for none
  int64_t numel;
  int64_t step;           // of this update, counted from 1
  int32_t group;          // index into the groups
  int32_t grad_dtype;     // GACC_F32 or GACC_BF16
  int32_t copy_dtype;     // GACC_NONE, GACC_F32 or GACC_BF16
};

GACC_API int32_t gacc_abi_version(void);
GACC_API const char* gacc_last_error(void);

// The instruction sets that this build has kernels for, slowest first: [0, gacc_isa_count()).
GACC_API int32_t gacc_isa_count(void);
GACC_API const char* gacc_isa_name(int32_t isa);
GACC_API int32_t gacc_isa_available(int32_t isa);  // 1 if this CPU runs it

// Updates all tensors once, in parallel. Nothing is written if an argument is refused.
GACC_API int32_t gacc_adam_step(const gacc_adam_tensor* tensors, int64_t num_tensors, const gacc_adam_group* groups,
                                int64_t num_groups, int32_t isa, int32_t num_threads);

// For benchmarks: reads and writes what an fp32 Adam step does, with one addition per written value.
GACC_API int32_t gacc_traffic_probe(float* param, float* exp_avg, float* exp_avg_sq, const float* grad, int64_t numel,
                                    int32_t isa, int32_t num_threads);

// Asks for huge pages for the whole pages inside [data, data + size_bytes); to be called before they are first touched.
GACC_API int32_t gacc_advise_huge_pages(void* data, int64_t size_bytes);

// Streams: blocks that running programs copy to host memory as they make them (the custom call gacc_send_to_host). Every device has a block for each
// slot; `destinations` and `sizes` (in bytes) hold them by device and then slot, null for a block that another device sends.
GACC_API int32_t gacc_stream_open(void* const* destinations, const int64_t* sizes, int64_t num_devices, int64_t num_slots, int64_t* id);

// Copies a block to its destination and wakes who waits. Nothing happens where the stream is closed; a block that was sent before is refused.
GACC_API int32_t gacc_stream_send(int64_t id, int64_t device, int64_t slot, const void* data, int64_t size_bytes);

// Waits until blocks have arrived, for `seconds` at the most; at most `capacity` of them as device * num_slots + slot, with their seconds of CLOCK_MONOTONIC.
GACC_API int32_t gacc_stream_wait(int64_t id, double seconds, int64_t capacity, int64_t* places, double* when, int64_t* count);

// Destinations are not written any more when it returns.
GACC_API int32_t gacc_stream_close(int64_t id);

// What a query gets whose keys are all masked.
enum gacc_empty_rows : int32_t {
  GACC_ZEROS = 0,            // zeros, as with masks of -infinity in torch's fused attention
  GACC_UNIFORM = 1,          // the mean over all keys, as where a mask adds the lowest finite number to the scores
  GACC_UNIFORM_CONSTANT = 2  // the same, and the bias gets no gradient: the mask stood in the bias' place
};

// One attention. Arrays are dense and row-major; B samples, H query heads, G key/value heads (H a multiple of G), T queries, S keys.
// Query t sees key s if t - left <= s <= t + right (a negative bound is none), if their segments are equal, or there are none.
struct gacc_attention {
  const void* q;              // [B, H, T, head_dim]
  const void* k;              // [B, G, S, head_dim]
  const void* v;              // [B, G, S, value_dim]
  const float* bias;          // null, or added to the scores, in `bias_strides`
  const int32_t* q_segments;  // [B, T], or null together with
  const int32_t* kv_segments; // [B, S]
  int64_t bias_strides[4];    // in elements, of [B, H, T, S]; 0 where the bias broadcasts
  int64_t batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim;
  int64_t left, right;
  int32_t dtype;              // of q, k, v, the output and their gradients
  int32_t empty_rows;
  float scale;
  float dropout;              // probability of a zero
  uint32_t key[2];            // of the random numbers, which graphacc/ops/random.py describes
  int64_t stream;
  int64_t start[4];           // index of the first score in the global [B, H, T, S], whose
  int64_t global_size[4];
};

// Writes the output [B, H, T, value_dim] and the log-sum-exp of every row [B, H, T].
GACC_API int32_t gacc_flash_forward(const gacc_attention* attention, void* out, float* lse, int32_t isa, int32_t num_threads);

// Writes the gradients of q, k and v, and adds that of the bias to `grad_bias` if it is not null (in the strides of the bias).
GACC_API int32_t gacc_flash_backward(const gacc_attention* attention, const void* grad, const void* out, const float* lse,
                                     void* grad_q, void* grad_k, void* grad_v, float* grad_bias, int32_t isa,
                                     int32_t num_threads);

// Whether the torch of this process has the products that the custom calls gacc_product, gacc_grouped and gacc_grouped_outer use, and whether
// this CPU has instructions for products of a dtype; without them a product of fp32 copies is faster.
GACC_API int32_t gacc_has_products(void);
GACC_API int32_t gacc_multiplies_natively(int32_t dtype);

// For the files of serialised CUDA executables (graphacc/runtime/replan/riegeli.py): a hash under a key of four numbers, and the
// decompression of a raw Snappy block that must give exactly `out_size` bytes.
GACC_API int32_t gacc_highway_hash64(const uint64_t* key, const uint8_t* data, int64_t size, uint64_t* hash);
GACC_API int32_t gacc_snappy_decompress(const uint8_t* data, int64_t size, uint8_t* out, int64_t out_size);

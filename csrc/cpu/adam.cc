// gacc_adam_step: checks its arguments, cuts all tensors into chunks and hands them to the kernels.
#include <cmath>
#include <new>
#include <vector>

#include "error.h"
#include "gacc.h"
#include "isa.h"
#include "kernels.h"
#include "parallel.h"

namespace {

using gacc::AdamScalars;
using gacc::AdamSlice;
using gacc::fail;

struct Chunk {
  const gacc_adam_tensor* tensor;
  const AdamScalars* scalars;
  int64_t begin;
};

int check_group(const gacc_adam_group& group, int64_t index) {
  for (double beta : {group.beta1, group.beta2}) {
    if (!(beta >= 0.0 && beta < 1.0)) {
      return fail("group %lld: a beta is %g, expected 0 <= beta < 1", static_cast<long long>(index), beta);
    }
  }
  return 0;
}

const char* problem(const gacc_adam_tensor& tensor, int64_t num_groups) {
  if (tensor.numel < 0) return "numel is negative";
  if (tensor.step < 1) return "step is below 1";
  if (tensor.group < 0 || tensor.group >= num_groups) return "group is out of range";
  if (tensor.grad_dtype != GACC_F32 && tensor.grad_dtype != GACC_BF16) return "grad_dtype is neither F32 nor BF16";
  if (tensor.copy_dtype < GACC_NONE || tensor.copy_dtype > GACC_BF16) return "copy_dtype is unknown";
  if (tensor.numel == 0) return nullptr;
  if (!tensor.param || !tensor.exp_avg || !tensor.exp_avg_sq || !tensor.grad) return "an array is null";
  if ((tensor.copy == nullptr) != (tensor.copy_dtype == GACC_NONE)) return "copy and copy_dtype disagree";
  return nullptr;
}

int check(const gacc_adam_tensor* tensors, int64_t num_tensors, const gacc_adam_group* groups, int64_t num_groups) {
  if (num_tensors < 0 || num_groups < 0 || (num_tensors && !tensors) || (num_groups && !groups)) {
    return fail("a negative count, or a null list of %lld tensors and %lld groups", static_cast<long long>(num_tensors),
                static_cast<long long>(num_groups));
  }
  for (int64_t i = 0; i < num_groups; ++i) {
    if (check_group(groups[i], i)) return -1;
  }
  for (int64_t i = 0; i < num_tensors; ++i) {
    if (const char* what = problem(tensors[i], num_groups)) return fail("tensor %lld: %s", static_cast<long long>(i), what);
  }
  return 0;
}

AdamScalars scalars_of(const gacc_adam_group& group, int64_t step) {
  const double correction1 = 1.0 - std::pow(group.beta1, static_cast<double>(step));
  const double correction2 = 1.0 - std::pow(group.beta2, static_cast<double>(step));
  AdamScalars scalars;
  scalars.sign = group.maximize ? -1.0f : 1.0f;
  scalars.decay = static_cast<float>(group.decoupled ? 1.0 - group.lr * group.weight_decay : 1.0);
  scalars.l2 = static_cast<float>(group.decoupled ? 0.0 : group.weight_decay);
  scalars.grad_weight = static_cast<float>(1.0 - group.beta1);
  scalars.beta2 = static_cast<float>(group.beta2);
  scalars.square_weight = static_cast<float>(1.0 - group.beta2);
  scalars.inverse_root_correction = static_cast<float>(1.0 / std::sqrt(correction2));
  scalars.eps = static_cast<float>(group.eps);
  scalars.negative_step_size = static_cast<float>(-(group.lr / correction1));
  return scalars;
}

template <typename Array>
Array offset(Array array, int64_t numel) {
  return array ? array + numel : nullptr;
}

const void* offset(const void* array, int32_t dtype, int64_t numel) {
  return offset(static_cast<const char*>(array), numel * (dtype == GACC_BF16 ? 2 : 4));
}

AdamSlice slice_of(const gacc_adam_tensor& tensor, int64_t begin) {
  return {tensor.param + begin,
          tensor.exp_avg + begin,
          tensor.exp_avg_sq + begin,
          offset(tensor.max_exp_avg_sq, begin),
          offset(tensor.grad, tensor.grad_dtype, begin),
          const_cast<void*>(offset(tensor.copy, tensor.copy_dtype, begin)),
          gacc::chunk_size(tensor.numel, begin),
          tensor.grad_dtype,
          tensor.copy_dtype};
}

std::vector<Chunk> chunks_of(const gacc_adam_tensor* tensors, const std::vector<AdamScalars>& scalars) {
  std::vector<Chunk> chunks;
  for (size_t i = 0; i < scalars.size(); ++i) {
    for (int64_t begin = 0; begin < tensors[i].numel; begin += gacc::chunk_numel) {
      chunks.push_back({&tensors[i], &scalars[i], begin});
    }
  }
  return chunks;
}

}  // namespace

int32_t gacc_adam_step(const gacc_adam_tensor* tensors, int64_t num_tensors, const gacc_adam_group* groups,
                       int64_t num_groups, int32_t isa, int32_t num_threads) try {
  const gacc::Kernels* kernels = gacc::find_kernels(isa);
  if (!kernels || gacc::check_threads(num_threads) || check(tensors, num_tensors, groups, num_groups)) return -1;
  std::vector<AdamScalars> scalars;
  for (int64_t i = 0; i < num_tensors; ++i) scalars.push_back(scalars_of(groups[tensors[i].group], tensors[i].step));
  const std::vector<Chunk> chunks = chunks_of(tensors, scalars);
  return gacc::run_parallel(static_cast<int64_t>(chunks.size()), num_threads, [&](int64_t i) {
    kernels->adam(slice_of(*chunks[i].tensor, chunks[i].begin), *chunks[i].scalars);
  });
} catch (const std::bad_alloc&) {
  return fail("out of memory for the work list of %lld tensors", static_cast<long long>(num_tensors));
}

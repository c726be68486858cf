// Splitting arrays into pieces for the thread pool.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <exception>

#include "error.h"
#include "thread_pool.h"

namespace gacc {

// Elements per task: small enough to balance, large enough (about a megabyte of Adam's traffic) to hide the hand-over.
constexpr int64_t chunk_numel = 131072;
constexpr int max_threads = 1024;

inline int check_threads(int32_t num_threads) {
  if (num_threads >= 1 && num_threads <= max_threads) return 0;
  return fail("num_threads is %d, expected 1 to %d", num_threads, max_threads);
}

inline int64_t num_chunks(int64_t numel) { return (numel + chunk_numel - 1) / chunk_numel; }

inline int64_t chunk_size(int64_t numel, int64_t begin) { return std::min(chunk_numel, numel - begin); }

// Runs the tasks on the pool; out of memory or threads becomes an error of the C ABI.
template <typename Task>
int run_parallel(int64_t num_tasks, int32_t num_threads, const Task& task) {
  try {
    ThreadPool::instance().run(num_tasks, num_threads, task);
    return 0;
  } catch (const std::exception& error) {
    return fail("cannot start %d threads: %s", num_threads, error.what());
  }
}

}  // namespace gacc

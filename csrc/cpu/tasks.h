// Tasks on threads of somebody else's pool, which may all be busy, or wait here too.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

namespace gacc {

// Runs task(0) .. task(num_tasks - 1), each once, and returns when all are done: whether all returned true.
// `schedule` hands a function to the pool, to run at any time or late; the caller works too and waits only for tasks that have been
// taken. A helper that comes too late finds no task and touches nothing but the state that it shares.
template <typename Schedule>
bool run_tasks(int64_t num_tasks, int64_t num_threads, const Schedule& schedule, const std::function<bool(int64_t)>& task) {
  struct State {
    const std::function<bool(int64_t)>& task;  // of the caller, who stays as long as there are tasks
    const int64_t num_tasks;
    std::atomic<int64_t> next{0};
    std::mutex mutex;  // guards what follows
    std::condition_variable finished;
    int64_t num_done = 0;
    bool succeeded = true;

    State(const std::function<bool(int64_t)>& task, int64_t num_tasks) : task(task), num_tasks(num_tasks) {}

    void work() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
        const bool good = task(i);
        std::lock_guard<std::mutex> lock(mutex);
        succeeded &= good;
        if (++num_done == num_tasks) finished.notify_one();
      }
    }
  };
  if (num_tasks <= 0) return true;
  const auto state = std::make_shared<State>(task, num_tasks);
  const int64_t num_helpers = std::min(num_tasks, num_threads) - 1;
  for (int64_t i = 0; i < num_helpers; ++i) schedule([state] { state->work(); });
  state->work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->finished.wait(lock, [&] { return state->num_done == num_tasks; });
  return state->succeeded;
}

}  // namespace gacc

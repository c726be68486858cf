// A persistent pool of worker threads, shared by all kernels of the library.
#pragma once

#include <stdint.h>

#include <condition_variable>
#include <functional>
#include <mutex>

namespace gacc {

// Threads start at the first job that wants them and sleep between jobs. The caller works too, and waits only for tasks
// that have been taken, never for a sleeping worker. A forked child gets a new pool.
class ThreadPool {
 public:
  static ThreadPool& instance();

  // Calls task(0) .. task(num_tasks - 1), each once, on at most num_threads threads. A caller that finds the
  // pool busy with another caller's job does its tasks alone: XLA's virtual devices run at once, each on a thread of its own.
  void run(int64_t num_tasks, int num_threads, const std::function<void(int64_t)>& task);

 private:
  struct Job;

  void start_workers(int num_workers);
  void work(int worker);

  std::mutex turn_;   // held by the caller of the current job
  std::mutex mutex_;  // guards all that follows
  std::condition_variable wake_, finished_;
  Job* job_ = nullptr;
  uint64_t num_jobs_ = 0;
  int num_busy_ = 0;
  int num_workers_ = 0;
};

}  // namespace gacc

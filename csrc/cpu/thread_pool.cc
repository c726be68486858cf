#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <thread>

namespace gacc {
namespace {

// Never deleted: workers may still sleep in it while the process exits. A forked child has none of the workers, and
// perhaps a mutex locked by one of them, so it starts anew.
std::atomic<ThreadPool*> pool{new ThreadPool};
const int fork_handler = pthread_atfork(nullptr, nullptr, [] { pool.store(new ThreadPool); });

}  // namespace

struct ThreadPool::Job {
  const std::function<void(int64_t)>& task;
  const int64_t num_tasks;
  const int num_workers;
  std::atomic<int64_t> next{0};

  void take_tasks() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) task(i);
  }
};

ThreadPool& ThreadPool::instance() { return *pool.load(); }

void ThreadPool::run(int64_t num_tasks, int num_threads, const std::function<void(int64_t)>& task) {
  const int num_workers = static_cast<int>(std::min<int64_t>(num_threads, num_tasks)) - 1;
  std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
  if (!turn) {
    for (int64_t i = 0; i < num_tasks; ++i) task(i);
    return;
  }
  Job job{task, num_tasks, num_workers};
  if (num_workers > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    start_workers(num_workers);
    job_ = &job;
    ++num_jobs_;
    wake_.notify_all();
  }
  job.take_tasks();
  std::unique_lock<std::mutex> lock(mutex_);
  job_ = nullptr;
  finished_.wait(lock, [this] { return num_busy_ == 0; });
}

void ThreadPool::start_workers(int num_workers) {
  for (; num_workers_ < num_workers; ++num_workers_) std::thread(&ThreadPool::work, this, num_workers_).detach();
}

void ThreadPool::work(int worker) {
  uint64_t last_job = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return job_ && num_jobs_ != last_job && worker < job_->num_workers; });
    last_job = num_jobs_;
    Job& job = *job_;
    ++num_busy_;
    lock.unlock();
    job.take_tasks();
    lock.lock();
    if (--num_busy_ == 0) finished_.notify_one();
  }
}

}  // namespace gacc

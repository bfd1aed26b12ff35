#include "util/thread_pool.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <thread>

namespace offload {
namespace {

std::atomic<ThreadPool*> shared_pool{nullptr};

// Threads started in this scope take no signals: handlers (Python's among them) stay with the threads that
// the application made.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

ThreadPool::ThreadPool() : pid_(getpid()) {}

ThreadPool& ThreadPool::shared() {
  ThreadPool* current = shared_pool.load(std::memory_order_acquire);
  while (current == nullptr || current->pid_ != getpid()) {
    auto* fresh = new ThreadPool();
    if (shared_pool.compare_exchange_strong(current, fresh, std::memory_order_acq_rel)) return *fresh;
    operator delete(fresh);  // another thread was first; nothing has been started in this one
  }
  return *current;
}

void ThreadPool::run_erased(size_t task_count, unsigned threads, Call call, const void* task) {
  const size_t helpers = std::min<size_t>(std::max(threads, 1U), std::max<size_t>(task_count, 1)) - 1;
  Job job;
  job.call = call;
  job.task = task;
  job.task_count = task_count;
  if (helpers == 0) {
    drain(job);
    return;
  }
  const std::lock_guard turn(turn_);
  {
    const std::lock_guard lock(mutex_);
    start_workers(helpers);
    job_ = &job;
    places_ = std::min(helpers, workers_);
  }
  for (size_t i = 0; i < helpers; ++i) job_posted_.notify_one();
  drain(job);
  std::unique_lock lock(mutex_);
  places_ = 0;  // a worker that wakes only now has nothing to do
  job_left_.wait(lock, [this] { return inside_ == 0; });
  job_ = nullptr;
}

void ThreadPool::start_workers(size_t count) {
  const SignalsBlocked signals_blocked;
  while (workers_ < count) {
    try {
      std::thread(&ThreadPool::work, this).detach();
    } catch (const std::system_error&) {
      return;  // the system has no thread to give: the job runs, and gives the same result, on fewer
    }
    ++workers_;
  }
}

void ThreadPool::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    job_posted_.wait(lock, [this] { return places_ > 0; });
    --places_;
    ++inside_;
    Job& job = *job_;
    lock.unlock();
    drain(job);
    lock.lock();
    if (--inside_ == 0) job_left_.notify_one();
  }
}

void ThreadPool::drain(Job& job) noexcept {
  for (;;) {
    const size_t index = job.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= job.task_count) return;
    job.call(job.task, index);
  }
}

}  // namespace offload

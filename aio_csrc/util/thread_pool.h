// One persistent pool of worker threads for the CPU kernels.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace offload {

// Runs independent tasks on the caller and on workers that sleep between jobs (no spinning: the engine's
// computing threads own the cores in between). One job runs at a time; a second caller waits for its turn.
// Which thread runs which task is not fixed, so a task must not depend on it.
class ThreadPool {
 public:
  // The pool of this process. After fork() the child gets a new one: threads do not survive a fork, and the
  // parent's pool, whose locks may have been held at that moment, is left untouched.
  static ThreadPool& shared();

  // Calls task(index) once for every index in [0, task_count), on at most `threads` threads, the calling one
  // included, and returns when all calls have returned. The task must not throw.
  template <class Task>
  void run(size_t task_count, unsigned threads, const Task& task) {
    run_erased(task_count, threads, &call<Task>, &task);
  }

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

 private:
  using Call = void (*)(const void* task, size_t index) noexcept;

  struct Job {
    Call call = nullptr;
    const void* task = nullptr;
    size_t task_count = 0;
    std::atomic<size_t> next{0};
  };

  ThreadPool();
  ~ThreadPool() = delete;  // lives as long as the process: its workers never have to be joined at exit

  template <class Task>
  static void call(const void* task, size_t index) noexcept {
    (*static_cast<const Task*>(task))(index);
  }

  void run_erased(size_t task_count, unsigned threads, Call call, const void* task);
  void start_workers(size_t count);
  void work();
  static void drain(Job& job) noexcept;

  const pid_t pid_;
  std::mutex turn_;   // held by the caller whose job runs
  std::mutex mutex_;  // guards everything below
  std::condition_variable job_posted_;
  std::condition_variable job_left_;
  Job* job_ = nullptr;
  size_t places_ = 0;  // workers that may still join the job
  size_t inside_ = 0;  // workers that are running tasks of the job
  size_t workers_ = 0;
};

}  // namespace offload

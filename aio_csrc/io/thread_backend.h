#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "io/backend.h"

namespace offload {

// pread, pwrite and fdatasync on a few threads. Always built; the reference for the other backends.
class ThreadBackend final : public IoBackend {
 public:
  explicit ThreadBackend(size_t threads);  // throws BackendError where the threads cannot be started
  ~ThreadBackend() override;

  [[nodiscard]] size_t submit(std::span<const IoRequest> requests) override;
  [[nodiscard]] size_t reap(std::span<IoCompletion> out, size_t count_min) override;
  void wake() noexcept override;
  [[nodiscard]] IoCapabilities capabilities() const noexcept override { return {"threads", threads_max_}; }
  [[nodiscard]] double cpu_seconds() const noexcept override;

 private:
  void work();
  void stop() noexcept;

  const size_t threads_max_;
  std::mutex mutex_;  // guards all below
  std::condition_variable work_ready_;
  std::condition_variable results_ready_;
  std::deque<IoRequest> requests_;
  std::deque<IoCompletion> completions_;
  size_t in_flight_ = 0;  // taken by submit, not yet handed out by reap
  bool woken_ = false;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace offload

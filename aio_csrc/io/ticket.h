#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "io/backend.h"

namespace offload {

// One transfer as its submitter sees it: a flag, a wait and, once done, the outcome. When it is done, the
// kernel does not touch the buffer any more, also where the transfer failed.
class Ticket {
 public:
  Ticket(IoOp op, uint64_t offset, uint64_t size) noexcept : op_(op), offset_(offset), size_(size) {}

  [[nodiscard]] bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  [[nodiscard]] bool wait_for(std::chrono::nanoseconds limit);  // done()
  void drain() noexcept;                                        // waits without limit

  [[nodiscard]] IoOp op() const noexcept { return op_; }
  [[nodiscard]] uint64_t offset() const noexcept { return offset_; }
  [[nodiscard]] uint64_t size() const noexcept { return size_; }

  // The outcome; of use once done().
  [[nodiscard]] int error() const noexcept { return error_; }  // 0 or an errno
  [[nodiscard]] uint64_t bytes_done() const noexcept { return bytes_done_; }
  [[nodiscard]] uint64_t order() const noexcept { return order_; }  // among all tickets of the queue, from 1
  [[nodiscard]] double seconds() const noexcept;                    // from submission to the end, or to now

  // Called once, by the queue.
  void finish(int error, uint64_t bytes_done, uint64_t order) noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  const IoOp op_;
  const uint64_t offset_;
  const uint64_t size_;
  const Clock::time_point begin_ = Clock::now();
  Clock::time_point end_;
  int error_ = 0;
  uint64_t bytes_done_ = 0;
  uint64_t order_ = 0;
  std::atomic<bool> done_ = false;
  std::mutex mutex_;
  std::condition_variable finished_;
};

}  // namespace offload

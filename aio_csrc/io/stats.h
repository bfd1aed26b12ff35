#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>

#include "io/backend.h"

namespace offload {

// What one direction has done so far.
struct DirectionStats {
  uint64_t bytes = 0;
  uint64_t requests = 0;       // completions of the backend, those that were refused or short included
  uint64_t resumed = 0;        // of them: short, continued
  uint64_t retried = 0;        // of them: refused (EINTR, EAGAIN), tried again
  uint64_t buffered = 0;       // of them: through the page cache
  uint64_t failed = 0;         // tickets that ended with an error
  uint64_t in_flight_max = 0;  // requests at once, at most
  double seconds_busy = 0;     // time with at least one request in flight
  double seconds_latency = 0;  // sum over requests
  double seconds_latency_max = 0;
};

// Counters of one queue. Written by the queue's thread, read by any.
class IoStats {
 public:
  using Clock = std::chrono::steady_clock;

  void begin(IoOp op, Clock::time_point now);
  void end(IoOp op, Clock::time_point begun, Clock::time_point now, bool buffered);
  void moved(IoOp op, uint64_t bytes);
  void resumed(IoOp op);
  void retried(IoOp op);
  void failed(IoOp op);

  [[nodiscard]] DirectionStats read(IoOp op) const;

 private:
  struct Direction {
    DirectionStats sum;
    uint32_t in_flight = 0;
    Clock::time_point busy_since;
  };

  mutable std::mutex mutex_;
  std::array<Direction, kIoOpCount> directions_;
};

}  // namespace offload

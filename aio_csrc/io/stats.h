#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "io/backend.h"
#include "io/histogram.h"

namespace offload {

inline constexpr size_t kDepthBuckets = 13;  // the deepest queue is 4096 requests

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
  std::array<double, kDepthBuckets> seconds_at_depth{};  // of it: [i] with 2^i to 2^(i+1) - 1 in flight
  double seconds_latency = 0;                            // sum over requests
  double seconds_latency_p50 = 0;
  double seconds_latency_p90 = 0;
  double seconds_latency_p99 = 0;
  double seconds_latency_max = 0;
};

// One request that the backend has and has not answered.
struct RequestInFlight {
  IoOp op;
  uint64_t offset;
  uint64_t size;
  double seconds;
};

// Counters of one queue, and what is in flight. Written by the queue's thread, read by any.
class IoStats {
 public:
  using Clock = std::chrono::steady_clock;

  void set_depth(size_t depth) { requests_.resize(depth); }  // before all else; tokens are below it

  void begin(const IoRequest& request, Clock::time_point now);
  void end(uint64_t token, Clock::time_point now, bool buffered);
  void moved(IoOp op, uint64_t bytes);
  void resumed(IoOp op);
  void retried(IoOp op);
  void failed(IoOp op);

  [[nodiscard]] DirectionStats read(IoOp op) const;
  [[nodiscard]] std::optional<RequestInFlight> oldest() const;

 private:
  struct Request {
    IoOp op;
    uint64_t offset;
    uint64_t size;
    Clock::time_point begun;
    bool in_flight;
  };
  struct Direction {
    DirectionStats sum;
    Histogram latency_ns;
    std::array<Clock::duration, kDepthBuckets> at_depth{};
    uint32_t in_flight = 0;
    Clock::time_point changed;  // when in_flight last did

    void settle(Clock::time_point now) noexcept;
  };

  mutable std::mutex mutex_;
  std::array<Direction, kIoOpCount> directions_;
  std::vector<Request> requests_;  // by token
};

}  // namespace offload

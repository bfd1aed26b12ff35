#include "io/stats.h"

#include <algorithm>

namespace offload {

namespace {

double seconds(IoStats::Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

void IoStats::begin(IoOp op, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  Direction& direction = directions_[static_cast<size_t>(op)];
  if (direction.in_flight++ == 0) direction.busy_since = now;
  direction.sum.in_flight_max = std::max<uint64_t>(direction.sum.in_flight_max, direction.in_flight);
}

void IoStats::end(IoOp op, Clock::time_point begun, Clock::time_point now, bool buffered) {
  const std::lock_guard lock(mutex_);
  Direction& direction = directions_[static_cast<size_t>(op)];
  DirectionStats& sum = direction.sum;
  const double latency = seconds(now - begun);
  ++sum.requests;
  sum.buffered += buffered ? 1 : 0;
  sum.seconds_latency += latency;
  sum.seconds_latency_max = std::max(sum.seconds_latency_max, latency);
  if (--direction.in_flight == 0) sum.seconds_busy += seconds(now - direction.busy_since);
}

void IoStats::moved(IoOp op, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  directions_[static_cast<size_t>(op)].sum.bytes += bytes;
}

void IoStats::resumed(IoOp op) {
  const std::lock_guard lock(mutex_);
  ++directions_[static_cast<size_t>(op)].sum.resumed;
}

void IoStats::retried(IoOp op) {
  const std::lock_guard lock(mutex_);
  ++directions_[static_cast<size_t>(op)].sum.retried;
}

void IoStats::failed(IoOp op) {
  const std::lock_guard lock(mutex_);
  ++directions_[static_cast<size_t>(op)].sum.failed;
}

DirectionStats IoStats::read(IoOp op) const {
  const std::lock_guard lock(mutex_);
  const Direction& direction = directions_[static_cast<size_t>(op)];
  DirectionStats sum = direction.sum;
  if (direction.in_flight > 0) sum.seconds_busy += seconds(Clock::now() - direction.busy_since);
  return sum;
}

}  // namespace offload

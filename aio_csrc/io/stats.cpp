#include "io/stats.h"

#include <algorithm>
#include <bit>

namespace offload {

namespace {

double seconds(IoStats::Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

// Books the time since the last change under the depth that was kept for so long.
void IoStats::Direction::settle(Clock::time_point now) noexcept {
  if (in_flight > 0) {
    const auto bucket = static_cast<size_t>(std::bit_width(in_flight) - 1);
    at_depth[std::min(bucket, kDepthBuckets - 1)] += now - changed;
  }
  changed = now;
}

void IoStats::begin(const IoRequest& request, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  requests_[request.token] = {request.op, request.offset, request.size, now, true};
  Direction& direction = directions_[static_cast<size_t>(request.op)];
  direction.settle(now);
  ++direction.in_flight;
  direction.sum.in_flight_max = std::max<uint64_t>(direction.sum.in_flight_max, direction.in_flight);
}

void IoStats::end(uint64_t token, Clock::time_point now, bool buffered) {
  const std::lock_guard lock(mutex_);
  Request& request = requests_[token];
  request.in_flight = false;
  Direction& direction = directions_[static_cast<size_t>(request.op)];
  direction.settle(now);
  --direction.in_flight;
  const auto latency = now - request.begun;
  direction.latency_ns.add(static_cast<uint64_t>(std::chrono::nanoseconds(latency).count()));
  DirectionStats& sum = direction.sum;
  ++sum.requests;
  sum.buffered += buffered ? 1 : 0;
  sum.seconds_latency += seconds(latency);
  sum.seconds_latency_max = std::max(sum.seconds_latency_max, seconds(latency));
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
  std::unique_lock lock(mutex_);
  Direction direction = directions_[static_cast<size_t>(op)];
  lock.unlock();
  direction.settle(Clock::now());
  DirectionStats& sum = direction.sum;
  for (size_t i = 0; i < kDepthBuckets; ++i) {
    sum.seconds_at_depth[i] = seconds(direction.at_depth[i]);
    sum.seconds_busy += sum.seconds_at_depth[i];
  }
  const auto percentile = [&](double share) {  // the middle of the last bucket may lie above the maximum
    return std::min(direction.latency_ns.percentile(share) * 1e-9, sum.seconds_latency_max);
  };
  sum.seconds_latency_p50 = percentile(0.50);
  sum.seconds_latency_p90 = percentile(0.90);
  sum.seconds_latency_p99 = percentile(0.99);
  return sum;
}

std::optional<RequestInFlight> IoStats::oldest() const {
  const std::lock_guard lock(mutex_);
  const Request* found = nullptr;
  for (const Request& request : requests_) {
    if (request.in_flight && (found == nullptr || request.begun < found->begun)) found = &request;
  }
  if (found == nullptr) return std::nullopt;
  return RequestInFlight{found->op, found->offset, found->size, seconds(Clock::now() - found->begun)};
}

}  // namespace offload

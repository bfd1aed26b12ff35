#include "io/faulty_backend.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace offload {

namespace {

constexpr uint64_t kBlock = 4096;  // what an O_DIRECT transfer may be cut to

// splitmix64: small, and good enough to draw faults from.
uint64_t mix(uint64_t x) noexcept {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

bool one_in(uint64_t count, uint64_t luck, uint64_t salt) noexcept {
  return count != 0 && mix(luck ^ salt) % count == 0;
}

bool is_direct(int fd) noexcept { return (::fcntl(fd, F_GETFL) & O_DIRECT) != 0; }

}  // namespace

FaultyBackend::FaultyBackend(std::unique_ptr<IoBackend> inner, const FaultPlan& plan)
    : inner_(std::move(inner)), plan_(plan), reorder_state_(mix(plan.seed)) {}

FaultyBackend::~FaultyBackend() = default;

size_t FaultyBackend::submit(std::span<const IoRequest> requests) {
  if (plan_.submit_one != 0) requests = requests.first(std::min<size_t>(requests.size(), 1));
  size_t count = 0;
  for (const IoRequest& original : requests) {
    if (original.op == IoOp::kSync) {
      if (plan_.sync_errno != 0) {
        held_.push_back({original.token, -static_cast<int64_t>(plan_.sync_errno)});
      } else if (inner_->submit({&original, 1}) == 0) {
        break;
      } else {
        ++inner_in_flight_;
      }
      ++count;
      continue;
    }
    // Whether the inner backend has room must not change what is drawn, so it is asked first.
    if (inner_in_flight_ >= inner_->capabilities().depth_max) break;
    ++data_operations_;
    const uint64_t luck = draw(original);
    if (plan_.delay_ms != 0 && (plan_.delay_at == 0 || plan_.delay_at == data_operations_)) {
      delayed_.insert(original.token);
    }
    if (const auto refused = refusal(original, luck)) {
      held_.push_back({original.token, *refused});
      ++count;
      continue;
    }
    if (plan_.lose_at == data_operations_ || one_in(plan_.lose_one_in, luck, 5)) lost_.insert(original.token);
    auto altered = torn(original, luck);
    if (!altered) altered = shortened(original, luck);
    start(original, altered);
    ++count;
  }
  return count;
}

void FaultyBackend::start(const IoRequest& request, const std::optional<Altered>& altered) {
  if (altered && altered->request.size == 0) {  // torn before its first byte
    held_.push_back({request.token, altered->result});
    return;
  }
  if (altered) altered_.emplace(request.token, *altered);
  if (inner_->submit({altered ? &altered->request : &request, 1}) != 1) std::abort();  // there was room
  ++inner_in_flight_;
}

uint64_t FaultyBackend::draw(const IoRequest& request) {
  const uint64_t attempt = tries_[{request.op, request.offset}]++;
  return mix(plan_.seed ^ mix(request.offset ^ mix(attempt * 2 + (request.op == IoOp::kWrite ? 1 : 0))));
}

std::optional<int64_t> FaultyBackend::refusal(const IoRequest& request, uint64_t luck) {
  if (plan_.fail_at != 0 && data_operations_ >= plan_.fail_at &&
      data_operations_ < plan_.fail_at + plan_.fail_count) {
    return -static_cast<int64_t>(plan_.fail_errno);
  }
  if (plan_.refuse_direct != 0 && is_direct(request.fd)) return -EINVAL;
  if (one_in(plan_.eintr_one_in, luck, 1)) return -EINTR;
  if (one_in(plan_.eagain_one_in, luck, 2)) return -EAGAIN;
  return std::nullopt;
}

std::optional<FaultyBackend::Altered> FaultyBackend::shortened(const IoRequest& request,
                                                               uint64_t luck) const {
  if (request.size < 2 || !one_in(plan_.short_one_in, luck, 3)) return std::nullopt;
  const uint64_t result = 1 + mix(luck ^ 4) % (request.size - 1);
  IoRequest carried_out = request;
  carried_out.size = is_direct(request.fd) ? (result + kBlock - 1) / kBlock * kBlock : result;
  return Altered{carried_out, static_cast<int64_t>(result), false};
}

std::optional<FaultyBackend::Altered> FaultyBackend::torn(const IoRequest& request, uint64_t luck) const {
  if (request.op != IoOp::kWrite) return std::nullopt;
  const bool fails = plan_.tear_at == data_operations_ || one_in(plan_.tear_one_in, luck, 6);
  const bool silent =
      plan_.tear_silently_at == data_operations_ || one_in(plan_.tear_silently_one_in, luck, 7);
  if (!fails && !silent) return std::nullopt;
  IoRequest part = request;
  part.size = mix(luck ^ 8) % request.size;
  if (is_direct(request.fd)) part.size -= part.size % kBlock;
  return Altered{part, fails ? -static_cast<int64_t>(plan_.fail_errno) : static_cast<int64_t>(request.size),
                 true};
}

void FaultyBackend::pull(size_t count_min) {
  std::array<IoCompletion, 64> done;
  const size_t count = inner_->reap(done, count_min);
  inner_in_flight_ -= count;
  for (size_t i = 0; i < count; ++i) {
    alter(done[i]);
    if (!lost_.contains(done[i].token)) held_.push_back(done[i]);
  }
}

void FaultyBackend::alter(IoCompletion& completion) {
  const auto found = altered_.find(completion.token);
  if (found == altered_.end()) return;
  const auto [request, result, is_torn] = found->second;
  altered_.erase(found);
  if (is_torn) {
    if (completion.result >= 0) completion.result = result;
  } else if (completion.result > result) {
    completion.result = result;
    const auto kept = static_cast<uint64_t>(result);
    if (request.op == IoOp::kRead) std::memset(request.buffer + kept, 0xA5, request.size - kept);
  }
}

// A token bucket that holds next to nothing: a drive that was idle does not make up for it.
void FaultyBackend::keep_to_rate(int64_t result) {
  if (result <= 0) return;
  const std::chrono::duration<double> seconds(static_cast<double>(result) /
                                              static_cast<double>(plan_.bytes_per_second));
  const auto earliest = std::chrono::steady_clock::now() - std::chrono::milliseconds(5);
  rate_next_ = std::max(rate_next_, earliest) +
               std::chrono::duration_cast<std::chrono::steady_clock::duration>(seconds);
  std::this_thread::sleep_until(rate_next_);
}

size_t FaultyBackend::reap(std::span<IoCompletion> out, size_t count_min) {
  const bool idle = held_.empty();
  pull(idle ? count_min : 0);
  size_t count = 0;
  while (count < out.size() && !held_.empty()) {
    if (plan_.reorder != 0) {
      reorder_state_ = mix(reorder_state_);
      std::swap(held_.front(), held_[reorder_state_ % held_.size()]);
      // Keep some back while more are on their way: they are overtaken.
      if (count > 0 && inner_in_flight_ > 0 && (reorder_state_ >> 32) % 2 == 0) break;
    }
    if (delayed_.erase(held_.front().token) != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(plan_.delay_ms));
    }
    if (plan_.bytes_per_second != 0) keep_to_rate(held_.front().result);
    out[count++] = held_.front();
    held_.pop_front();
  }
  return count;
}

}  // namespace offload

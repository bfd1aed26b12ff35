#include "io/thread_backend.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "io/error.h"
#include "util/cpu_clock.h"
#include "util/signal_block.h"

namespace offload {

namespace {

int64_t execute(const IoRequest& request) noexcept {
  ssize_t result = -1;
  switch (request.op) {
    case IoOp::kRead:
      result = ::pread(request.fd, request.buffer, request.size, static_cast<off_t>(request.offset));
      break;
    case IoOp::kWrite:
      result = ::pwrite(request.fd, request.buffer, request.size, static_cast<off_t>(request.offset));
      break;
    case IoOp::kSync:
      result = ::fdatasync(request.fd);
      break;
  }
  return result >= 0 ? result : -static_cast<int64_t>(errno);
}

}  // namespace

ThreadBackend::ThreadBackend(size_t threads) : threads_max_(std::max<size_t>(threads, 1)) {
  const SignalBlock block;
  try {
    for (size_t i = 0; i < threads_max_; ++i) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error& refused) {
    stop();
    throw BackendError(refused.code().value(), "pthread_create");
  }
}

ThreadBackend::~ThreadBackend() { stop(); }

void ThreadBackend::stop() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_ready_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

size_t ThreadBackend::submit(std::span<const IoRequest> requests) {
  size_t count = 0;
  {
    const std::lock_guard lock(mutex_);
    count = std::min(requests.size(), threads_max_ - in_flight_);
    requests_.insert(requests_.end(), requests.begin(), requests.begin() + static_cast<ptrdiff_t>(count));
    in_flight_ += count;
  }
  for (size_t i = 0; i < count; ++i) work_ready_.notify_one();
  return count;
}

size_t ThreadBackend::reap(std::span<IoCompletion> out, size_t count_min) {
  std::unique_lock lock(mutex_);
  results_ready_.wait(lock, [&] { return completions_.size() >= count_min || woken_; });
  woken_ = false;
  const size_t count = std::min(out.size(), completions_.size());
  const auto end = completions_.begin() + static_cast<ptrdiff_t>(count);
  std::copy(completions_.begin(), end, out.begin());
  completions_.erase(completions_.begin(), end);
  in_flight_ -= count;
  return count;
}

void ThreadBackend::wake() noexcept {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  results_ready_.notify_one();
}

double ThreadBackend::cpu_seconds() const noexcept {
  double sum = 0;
  for (const std::thread& thread : threads_)
    sum += cpu_seconds_of(const_cast<std::thread&>(thread).native_handle());
  return sum;
}

void ThreadBackend::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_ready_.wait(lock, [&] { return !requests_.empty() || stopping_; });
    if (requests_.empty()) return;  // what was taken is carried out even while stopping
    const IoRequest request = requests_.front();
    requests_.pop_front();
    lock.unlock();
    const int64_t result = execute(request);
    lock.lock();
    completions_.push_back({request.token, result});
    results_ready_.notify_one();
  }
}

}  // namespace offload

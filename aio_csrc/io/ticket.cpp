#include "io/ticket.h"

namespace offload {

bool Ticket::wait_for(std::chrono::nanoseconds limit) {
  std::unique_lock lock(mutex_);
  return finished_.wait_for(lock, limit, [&] { return done(); });
}

void Ticket::drain() noexcept {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return done(); });
}

double Ticket::seconds() const noexcept {
  return std::chrono::duration<double>((done() ? end_ : Clock::now()) - begin_).count();
}

void Ticket::finish(int error, uint64_t bytes_done, uint64_t order) noexcept {
  const std::lock_guard lock(mutex_);
  error_ = error;
  bytes_done_ = bytes_done;
  order_ = order;
  end_ = Clock::now();
  done_.store(true, std::memory_order_release);
  finished_.notify_all();  // under the lock: a waiter may destroy the ticket as soon as it sees it done
}

}  // namespace offload

#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "io/worker.h"

namespace offload {

// All transfers of one file, kept in flight by one thread.
//
// The life of a request: make() makes a Ticket and a Transfer, add_within() leaves the Transfer in the inbox
// and wakes the Worker's thread, which moves it to the Schedule. Whenever one of the queue_depth slots is
// free, the Schedule cuts the next Piece off the transfer that goes first, by priority and then by age; the
// piece takes the slot, and the slot's index is the token of the IoRequest the backend gets. Every completion
// is looked at: the piece has ended, or is short and resumed where it stopped, or was refused for the moment
// (EINTR, EAGAIN) and tried again, or has failed: then the transfer's remaining pieces are given up. The
// transfer ends when none of its pieces is in flight and none is to come; then its Ticket is finished: the
// kernel is done with the buffer. The queue never drains between transfers: slots are filled from the next
// one while the last is still running.
class IoQueue {
 public:
  // Throws IoError (the file), BackendError, std::invalid_argument.
  explicit IoQueue(const QueueOptions& options);
  // Cancels what is pending; in a forked child, lets go.
  ~IoQueue();
  IoQueue(const IoQueue&) = delete;
  IoQueue& operator=(const IoQueue&) = delete;

  // A transfer for add_within(). A sync is done when all writes accepted before it are on stable storage; it
  // says nothing of their errors: those are in their own tickets. The buffer of the others must stay valid
  // until the ticket is done; a write only reads it.
  [[nodiscard]] static std::shared_ptr<Transfer> make(IoOp op, std::byte* buffer, uint64_t size,
                                                      uint64_t offset, IoPriority priority);
  // From any thread. See Worker.
  [[nodiscard]] Added add_within(std::chrono::nanoseconds limit, const std::shared_ptr<Transfer>& transfer) {
    return worker_->add_within(limit, transfer);
  }
  void leave_line(const Transfer& transfer) noexcept { worker_->leave_line(transfer); }
  void cancel(std::shared_ptr<const Ticket> ticket) { worker_->cancel(std::move(ticket)); }

  // Takes no more transfers; carries out what is pending or, with `cancel`, ends it with ECANCELED. What is
  // in flight always ends by itself. Idempotent; a later call may add `cancel`. From any thread, without
  // blocking.
  void request_close(bool cancel) noexcept { worker_->request_stop(cancel); }
  // Waits until that is done and the thread is gone; false where it takes longer than `limit`.
  [[nodiscard]] bool join_for(std::chrono::nanoseconds limit);

  // See IoBackend::add_region. EBADF where the queue is closed. Waits for the queue's thread.
  [[nodiscard]] int add_region(std::span<std::byte> region) { return worker_->add_region(region); }
  [[nodiscard]] int remove_region(std::span<std::byte> region) { return worker_->remove_region(region); }

  // See IoFile::preallocate. Throws IoError; EBADF where the queue is closed.
  bool preallocate(uint64_t size);

  // False in a forked child, which has a copy of this object but not the thread: it may only drop it.
  [[nodiscard]] bool owned() const noexcept { return ::getpid() == owner_pid_; }
  [[nodiscard]] pid_t owner_pid() const noexcept { return owner_pid_; }

  [[nodiscard]] const IoFile& file() const noexcept { return worker_->file(); }
  [[nodiscard]] const IoStats& stats() const noexcept { return worker_->stats(); }
  [[nodiscard]] const IoCapabilities& capabilities() const noexcept { return worker_->capabilities(); }
  [[nodiscard]] size_t queue_depth() const noexcept { return worker_->queue_depth(); }
  [[nodiscard]] double cpu_seconds() const noexcept { return worker_->cpu_seconds(); }

  // Gives up on requests that are never answered: thread, file and memory of the queue are left to the
  // process, for the kernel may still use them. Buffers must stay, too. Nothing but stats() is of use
  // afterwards.
  void abandon() noexcept { abandoned_ = true; }

 private:
  const pid_t owner_pid_ = ::getpid();
  std::unique_ptr<Worker> worker_;
  bool abandoned_ = false;
  std::mutex file_mutex_;  // nobody closes a descriptor that somebody else is calling the kernel with
};

}  // namespace offload

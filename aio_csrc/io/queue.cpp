#include "io/queue.h"

namespace offload {

IoQueue::IoQueue(const QueueOptions& options) : worker_(std::make_unique<Worker>(options)) {
  worker_->start();
}

IoQueue::~IoQueue() {
  if (owned()) {
    worker_->request_stop(/*cancel=*/true);
    while (!join_for(std::chrono::hours(1))) {
    }
    return;
  }
  // The thread is not in this process, and its locks may have been copied while held: neither is touched, and
  // the memory is left alone. Only this process's copies of the descriptors are closed, so that a child that
  // lives long does not keep the space of a deleted file.
  worker_.release()->file().close();
}

bool IoQueue::join_for(std::chrono::nanoseconds limit) {
  if (!worker_->join_for(limit)) return false;
  const std::lock_guard lock(file_mutex_);
  worker_->file().close();
  return true;
}

bool IoQueue::preallocate(uint64_t size) {
  const std::lock_guard lock(file_mutex_);
  return worker_->file().preallocate(size);
}

std::shared_ptr<Ticket> IoQueue::read(std::byte* buffer, uint64_t size, uint64_t offset,
                                      IoPriority priority) {
  return add(IoOp::kRead, buffer, size, offset, priority);
}

std::shared_ptr<Ticket> IoQueue::write(const std::byte* buffer, uint64_t size, uint64_t offset,
                                       IoPriority priority) {
  return add(IoOp::kWrite, const_cast<std::byte*>(buffer), size, offset, priority);  // only read from
}

std::shared_ptr<Ticket> IoQueue::sync() { return add(IoOp::kSync, nullptr, 0, 0, IoPriority::kNeeded); }

std::shared_ptr<Ticket> IoQueue::add(IoOp op, std::byte* buffer, uint64_t size, uint64_t offset,
                                     IoPriority priority) {
  auto ticket = std::make_shared<Ticket>(op, offset, size);
  auto transfer = std::make_shared<Transfer>();
  transfer->ticket = ticket;
  transfer->buffer = buffer;
  transfer->priority = priority;
  return worker_->add(std::move(transfer)) ? ticket : nullptr;
}

}  // namespace offload

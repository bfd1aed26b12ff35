#include "io/queue.h"

namespace offload {

IoQueue::IoQueue(const QueueOptions& options) : worker_(std::make_unique<Worker>(options)) {
  worker_->start();
}

IoQueue::~IoQueue() {
  if (abandoned_) {
    [[maybe_unused]] const Worker* left = worker_.release();
    return;
  }
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

std::shared_ptr<Transfer> IoQueue::make(IoOp op, std::byte* buffer, uint64_t size, uint64_t offset,
                                        IoPriority priority) {
  auto transfer = std::make_shared<Transfer>();
  transfer->ticket = std::make_shared<Ticket>(op, offset, size);
  transfer->buffer = buffer;
  transfer->priority = priority;
  return transfer;
}

}  // namespace offload

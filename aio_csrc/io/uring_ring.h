#pragma once

#include <linux/io_uring.h>

#include <cstddef>
#include <cstdint>

#include "util/unique_fd.h"

namespace offload {

// The submission and completion rings shared with the kernel, by raw system calls. Used by one thread.
class UringRing {
 public:
  // Throws BackendError with the kernel's errno: ENOSYS (too old, or compiled out), EPERM (a seccomp profile,
  // or kernel.io_uring_disabled), ENOMEM (locked-memory limit), EOPNOTSUPP (older than Linux 5.6).
  // With `sqpoll` a kernel thread is to pick entries up; where that is refused, sqpoll_refused() says why.
  UringRing(uint32_t entries, bool sqpoll);
  ~UringRing();
  UringRing(const UringRing&) = delete;
  UringRing& operator=(const UringRing&) = delete;

  // The next free submission entry, zeroed; nullptr where the ring is full. Seen by the kernel at the next
  // enter.
  [[nodiscard]] io_uring_sqe* next_sqe() noexcept;

  // Entries that the kernel has not taken yet.
  [[nodiscard]] uint32_t unsubmitted() const noexcept { return unsubmitted_; }

  // Offers the kernel all entries and waits for count_min completions. 0 or an errno. A partial submission is
  // not an error: the kernel then returns without waiting and unsubmitted() stays above 0.
  [[nodiscard]] int enter(uint32_t count_min) noexcept { return enter(unsubmitted_, count_min); }

  // Waits for count_min completions and submits nothing.
  [[nodiscard]] int wait(uint32_t count_min) noexcept { return enter(0, count_min); }

  // io_uring_register: 0 or an errno. By the thread that made the ring.
  [[nodiscard]] int register_with(uint32_t opcode, const void* argument, uint32_t count) noexcept;

  [[nodiscard]] bool sqpoll() const noexcept { return sqpoll_; }
  [[nodiscard]] int sqpoll_refused() const noexcept { return sqpoll_refused_; }

  // Takes the oldest completion; false where there is none.
  [[nodiscard]] bool pop(io_uring_cqe& out) noexcept;

 private:
  [[nodiscard]] int enter(uint32_t count_submit, uint32_t count_min) noexcept;
  void set_up(uint32_t entries, bool sqpoll, io_uring_params& params);
  void map(const io_uring_params& params);
  void unmap() noexcept;
  void require_operations();

  UniqueFd fd_;
  bool sqpoll_ = false;
  int sqpoll_refused_ = 0;
  void* ring_memory_ = nullptr;
  size_t ring_bytes_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  size_t sqes_bytes_ = 0;

  uint32_t* sq_head_ = nullptr;   // written by the kernel
  uint32_t* sq_tail_ = nullptr;   // written by us
  uint32_t* sq_flags_ = nullptr;  // written by the kernel
  uint32_t sq_mask_ = 0;
  uint32_t sq_entries_ = 0;
  uint32_t* cq_head_ = nullptr;  // written by us
  uint32_t* cq_tail_ = nullptr;  // written by the kernel
  uint32_t cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;

  uint32_t sq_tail_local_ = 0;  // entries filled; sq_tail_ follows it at enter
  uint32_t unsubmitted_ = 0;
};

}  // namespace offload

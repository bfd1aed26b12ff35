#pragma once

#include <vector>

#include "io/backend.h"
#include "io/uring_memory.h"
#include "io/uring_ring.h"
#include "util/unique_fd.h"

namespace offload {

// io_uring. Created and used by one thread (the kernel checks it: IORING_SETUP_SINGLE_ISSUER).
class UringBackend final : public IoBackend {
 public:
  UringBackend(size_t depth, bool sqpoll);  // throws BackendError
  ~UringBackend() override;

  [[nodiscard]] size_t submit(std::span<const IoRequest> requests) override;
  [[nodiscard]] size_t reap(std::span<IoCompletion> out, size_t count_min) override;
  void wake() noexcept override;
  [[nodiscard]] IoCapabilities capabilities() const noexcept override {
    return {"io_uring", depth_max_, ring_.sqpoll(), ring_.sqpoll_refused()};
  }
  void use_files(std::span<const int> fds) override;
  [[nodiscard]] int add_region(std::span<std::byte> region) override { return memory_.add(ring_, region); }
  void remove_region(std::span<std::byte> region) override { memory_.remove(ring_, region); }

 private:
  void fill(io_uring_sqe& sqe, const IoRequest& request) const noexcept;
  void arm_wake() noexcept;
  size_t take(std::span<IoCompletion> out, bool& woken) noexcept;

  const size_t depth_max_;
  UniqueFd wake_fd_;  // an eventfd; a poll on it sits in the ring, so that wake() ends a wait in the kernel
  UringRing ring_;    // after wake_fd_: closed first
  UringMemory memory_;
  std::vector<int> files_;  // those registered, by index
  bool wake_armed_ = false;
  size_t in_flight_ = 0;  // taken by submit, not yet handed out by reap
};

}  // namespace offload

#pragma once

#include <linux/aio_abi.h>

#include <vector>

#include "io/backend.h"
#include "util/unique_fd.h"

namespace offload {

// The kernel's older asynchronous interface, by raw system calls: for kernels and containers that refuse
// io_uring. Its submit blocks where a file system has to (buffered transfers, a file that grows).
class LibaioBackend final : public IoBackend {
 public:
  explicit LibaioBackend(size_t depth);  // throws BackendError; EAGAIN where fs.aio-max-nr is used up
  ~LibaioBackend() override;
  LibaioBackend(const LibaioBackend&) = delete;
  LibaioBackend& operator=(const LibaioBackend&) = delete;

  [[nodiscard]] size_t submit(std::span<const IoRequest> requests) override;
  [[nodiscard]] size_t reap(std::span<IoCompletion> out, size_t count_min) override;
  void wake() noexcept override;
  [[nodiscard]] IoCapabilities capabilities() const noexcept override { return {"libaio", depth_max_}; }

 private:
  void arm_wake();
  [[nodiscard]] size_t take_refused(std::span<IoCompletion> out);
  [[nodiscard]] size_t take(std::span<IoCompletion> out, size_t count_min, bool& woken);

  const size_t depth_max_;
  UniqueFd wake_fd_;  // an eventfd; a poll on it is in flight, so that wake() ends a wait in the kernel
  aio_context_t context_ = 0;
  bool wake_armed_ = false;
  size_t in_flight_ = 0;      // taken by submit, not yet handed out by reap
  std::vector<iocb> blocks_;  // filled anew by each submit; the kernel copies them
  std::vector<iocb*> block_pointers_;
  std::vector<io_event> events_;
  std::vector<IoCompletion> refused_;  // that the kernel has not started
};

}  // namespace offload

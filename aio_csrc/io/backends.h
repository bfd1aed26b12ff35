#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "io/backend.h"

namespace offload {

struct BackendOptions {
  size_t depth = 1;     // requests in flight at most
  size_t threads = 1;   // of `threads`
  bool sqpoll = false;  // of `io_uring`: a kernel thread picks requests up
};

// Names of all backends of this build, fastest first. `threads` is the last, and works everywhere.
[[nodiscard]] std::span<const std::string_view> backend_names() noexcept;

// Throws BackendError where the machine refuses it, std::invalid_argument for a name that is not a backend's.
[[nodiscard]] std::unique_ptr<IoBackend> make_backend(std::string_view name, const BackendOptions& options);

}  // namespace offload

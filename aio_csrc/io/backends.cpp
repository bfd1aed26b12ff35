#include "io/backends.h"

#include <array>
#include <stdexcept>
#include <string>

#include "io/libaio_backend.h"
#include "io/thread_backend.h"
#include "io/uring_backend.h"

namespace offload {

namespace {
constexpr std::array<std::string_view, 3> kNames = {"io_uring", "libaio", "threads"};
}  // namespace

std::span<const std::string_view> backend_names() noexcept { return kNames; }

std::unique_ptr<IoBackend> make_backend(std::string_view name, const BackendOptions& options) {
  if (name == "io_uring") return std::make_unique<UringBackend>(options.depth, options.sqpoll);
  if (name == "libaio") return std::make_unique<LibaioBackend>(options.depth);
  if (name == "threads") return std::make_unique<ThreadBackend>(options.threads);
  throw std::invalid_argument("no backend is called " + std::string(name));
}

}  // namespace offload

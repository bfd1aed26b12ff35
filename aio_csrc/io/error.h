#pragma once

#include <system_error>

namespace offload {

// A system call failed outside of a transfer (those report through their ticket).
class IoError : public std::system_error {
 public:
  IoError(int error, const char* operation)
      : std::system_error(error, std::generic_category(), operation), operation_(operation) {}
  [[nodiscard]] const char* operation() const noexcept { return operation_; }  // "open", "fallocate", ...

 private:
  const char* operation_;  // always a literal
};

// A backend cannot be used on this machine; another one may. Carries the errno that says why.
class BackendError : public IoError {
 public:
  using IoError::IoError;
};

}  // namespace offload

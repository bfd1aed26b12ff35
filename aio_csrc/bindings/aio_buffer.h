#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace offload {

// A view of a Python object's bytes; the object cannot free or move them while it lives. Needs the GIL.
class Buffer {
 public:
  Buffer(const pybind11::object& object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_FULL_RO) != 0) throw pybind11::error_already_set();
    held_ = true;
    if (PyBuffer_IsContiguous(&view_, 'C') == 0)
      throw pybind11::buffer_error("the buffer is not C-contiguous");
    if (writable && view_.readonly != 0)
      throw pybind11::buffer_error("the buffer is read-only, and a read fills it");
  }
  Buffer(Buffer&& other) noexcept : view_(other.view_), held_(std::exchange(other.held_, false)) {}
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() { release(); }

  void release() noexcept {
    if (std::exchange(held_, false)) PyBuffer_Release(&view_);
  }
  [[nodiscard]] std::byte* bytes() const noexcept { return static_cast<std::byte*>(view_.buf); }
  [[nodiscard]] uint64_t size() const noexcept { return static_cast<uint64_t>(view_.len); }
  [[nodiscard]] bool overlaps(const Buffer& other) const noexcept {
    return bytes() < other.bytes() + other.size() && other.bytes() < bytes() + size();
  }

 private:
  Py_buffer view_{};
  bool held_ = false;
};

}  // namespace offload

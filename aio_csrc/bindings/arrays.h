// Arrays as Python hands them over: contiguous buffers of plain numbers (bf16 as 16-bit integers). What is
// checked here keeps memory safe whoever calls; offload/optim checks what users pass and words the errors.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "optim/kernel_table.h"
#include "optim/spans.h"

namespace offload::bindings {

namespace py = pybind11;

// A contiguous array, kept alive while a kernel uses it.
class Array {
 public:
  Array(const py::buffer& buffer, const char* name, bool writable)
      : name_(name), info_(buffer.request(writable)) {
    if (info_.ndim != 1 || (info_.size > 1 && info_.strides[0] != info_.itemsize)) {
      throw std::invalid_argument(name_ + " must be a contiguous one-dimensional array");
    }
    if (reinterpret_cast<uintptr_t>(info_.ptr) % static_cast<size_t>(info_.itemsize) != 0) {
      throw std::invalid_argument(name_ + " is not aligned to its elements");
    }
  }
  [[nodiscard]] size_t count() const { return static_cast<size_t>(info_.size); }
  [[nodiscard]] size_t itemsize() const { return static_cast<size_t>(info_.itemsize); }
  [[nodiscard]] bool is_fp16() const { return info_.format == "e"; }

  [[nodiscard]] bool overlaps(const Array& other) const {
    return begin() < other.end() && other.begin() < end();
  }
  [[nodiscard]] const std::string& name() const { return name_; }

  // The elements, after a check of their number and size.
  template <class Element>
  [[nodiscard]] Element* elements(size_t expected_count) const {
    if (count() != expected_count || itemsize() != sizeof(Element)) {
      throw std::invalid_argument(name_ + " must hold " + std::to_string(expected_count) + " elements of " +
                                  std::to_string(sizeof(Element)) + " bytes, not " + std::to_string(count()) +
                                  " of " + std::to_string(itemsize()));
    }
    return static_cast<Element*>(info_.ptr);
  }

 private:
  [[nodiscard]] const std::byte* begin() const { return static_cast<const std::byte*>(info_.ptr); }
  [[nodiscard]] const std::byte* end() const { return begin() + count() * itemsize(); }

  std::string name_;
  py::buffer_info info_;
};

// The kernels read ahead of what they write, so no two arrays of a call may share memory.
inline void refuse_overlap(const std::vector<const Array*>& arrays) {
  for (auto a = arrays.begin(); a != arrays.end(); ++a) {
    for (auto b = a + 1; b != arrays.end(); ++b) {
      if ((*a)->overlaps(**b)) {
        throw std::invalid_argument((*a)->name() + " and " + (*b)->name() + " share memory");
      }
    }
  }
}

// Weight, residual and gradient of a call, whose types tell the format.
class MasterPlanes {
 public:
  MasterPlanes(const py::buffer& weight, const std::optional<py::buffer>& residual, const py::buffer& grad)
      : weight_(weight, "weight", true), grad_(grad, "grad", false) {
    if (residual) residual_.emplace(*residual, "residual", true);
  }
  [[nodiscard]] size_t count() const { return weight_.count(); }
  [[nodiscard]] bool has_residual() const { return residual_.has_value(); }
  [[nodiscard]] std::vector<const Array*> arrays() const {
    std::vector<const Array*> all{&weight_, &grad_};
    if (residual_) all.push_back(&*residual_);
    return all;
  }

  // The planes beside `moments`, after a check of their sizes.
  template <class Residual>
  [[nodiscard]] std::pair<optim::AdamPlanes, optim::PlaneFormat> planes(
      const optim::MomentPlanes& moments) const {
    using optim::PlaneFormat;
    optim::AdamPlanes planes{.weight = nullptr, .residual = nullptr, .moments = moments, .grad = nullptr};
    if (residual_) {
      planes.weight = weight_.elements<optim::Bf16>(count());
      planes.residual = residual_->elements<Residual>(count());
    } else {
      planes.weight = weight_.elements<float>(count());
    }
    if (grad_.is_fp16()) {
      planes.grad = grad_.elements<optim::Fp16>(count());
      return {planes, residual_ ? PlaneFormat::kBf16WeightFp16Grad : PlaneFormat::kFp32WeightFp16Grad};
    }
    if (residual_ && grad_.itemsize() == sizeof(optim::Bf16)) {
      planes.grad = grad_.elements<optim::Bf16>(count());
      return {planes, PlaneFormat::kBf16WeightBf16Grad};
    }
    planes.grad = grad_.elements<float>(count());
    return {planes, residual_ ? PlaneFormat::kBf16WeightFp32Grad : PlaneFormat::kFp32WeightFp32Grad};
  }

 private:
  Array weight_;
  Array grad_;
  std::optional<Array> residual_;
};

// Begin, end, step and the number of the first element in the model.
inline optim::Span to_span(size_t index, int64_t begin, int64_t end, int64_t step, uint64_t element) {
  if (begin < 0 || end < 0) optim::refuse(index, "begin and end must not be negative");
  return {static_cast<size_t>(begin), static_cast<size_t>(end), step, element};
}

// Defined in rules.cpp.
void bind_rules(py::module_& module);

}  // namespace offload::bindings

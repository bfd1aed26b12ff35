// Runs of elements that share their hyper-parameters: their checks, and how they are cut into work for
// threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "optim/kernel_table.h"

namespace offload::optim {

// Elements [begin, end) of a chunk, in their step number `step`, which counts from 1.
struct Span {
  size_t begin;
  size_t end;
  int64_t step;
  uint64_t element;  // number of element `begin` within the whole model: what its noise depends on
};

// Throws std::invalid_argument that names the segment.
[[noreturn]] void refuse(size_t index, const std::string& what);
void check_number(size_t index, const char* name, double value, bool in_range, const char* range);
// Segments ascend, do not overlap and lie in [0, count). `previous_end` is where the one before ends.
void check_span(size_t index, const Span& span, size_t previous_end, size_t count);

struct Work {
  size_t begin;
  size_t end;
  size_t segment;
  NoiseKeys noise;
};

// Cuts segment number `index` at multiples of kBlockElements, so that any cut into segments makes the same
// work, and where the noise needs new keys. `unit` elements are not cut for the latter: they use the keys of
// the first.
void append_work(std::vector<Work>& work, size_t index, const Span& span, uint64_t seed, size_t unit);

}  // namespace offload::optim

#include "optim/spans.h"

#include <algorithm>
#include <stdexcept>

#include "optim/blocks.h"

namespace offload::optim {
namespace {

// The finaliser of splitmix64 (Steele, Lea, Flood 2014).
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// Keys for elements from `index` of the planes on, up to a multiple of 2^32 of their numbers in the model.
NoiseKeys make_noise_keys(uint64_t seed, int64_t step, uint64_t element, size_t index) {
  const uint64_t of_step = mix(mix(seed + 0x9E3779B97F4A7C15) + static_cast<uint64_t>(step));
  const uint64_t keys = mix(of_step + (element >> 32));
  return {.before = static_cast<uint32_t>(keys),
          .between = static_cast<uint32_t>(keys >> 32),
          .first = static_cast<uint32_t>(element - index)};
}

size_t work_end(size_t begin, uint64_t element, size_t unit) {
  const size_t end = (begin / kBlockElements + 1) * kBlockElements;
  const uint64_t same_keys = (uint64_t{1} << 32) - (element & 0xFFFFFFFF);
  if (same_keys >= end - begin) return end;
  return begin + (static_cast<size_t>(same_keys) + unit - 1) / unit * unit;
}

}  // namespace

void refuse(size_t index, const std::string& what) {
  throw std::invalid_argument("segment " + std::to_string(index) + ": " + what);
}

void check_number(size_t index, const char* name, double value, bool in_range, const char* range) {
  if (!in_range) refuse(index, std::string(name) + " must be " + range + ", got " + std::to_string(value));
}

void check_span(size_t index, const Span& s, size_t previous_end, size_t count) {
  if (s.begin > s.end || s.end > count || s.begin < previous_end) {
    refuse(index, "[" + std::to_string(s.begin) + ", " + std::to_string(s.end) + ") must lie in [" +
                      std::to_string(previous_end) + ", " + std::to_string(count) +
                      "): after the segment before it, inside the planes");
  }
  if (s.step < 1) refuse(index, "step must be at least 1, got " + std::to_string(s.step));
}

void append_work(std::vector<Work>& work, size_t index, const Span& span, uint64_t seed, size_t unit) {
  for (size_t begin = span.begin; begin < span.end;) {
    const uint64_t element = span.element + (begin - span.begin);
    const size_t end = std::min(work_end(begin, element, unit), span.end);
    work.push_back({begin, end, index, make_noise_keys(seed, span.step, element, begin)});
    begin = end;
  }
}

}  // namespace offload::optim

#include "optim/adam.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "optim/blocks.h"

namespace offload::optim {
namespace {

struct Work {
  size_t begin;
  size_t end;
  size_t segment;
  NoiseKeys noise;
};

[[noreturn]] void refuse(size_t index, const std::string& what) {
  throw std::invalid_argument("segment " + std::to_string(index) + ": " + what);
}

void check_number(size_t index, const char* name, double value, bool in_range, const char* range) {
  if (!in_range) refuse(index, std::string(name) + " must be " + range + ", got " + std::to_string(value));
}

void check_segments(std::span<const AdamSegment> segments, size_t count) {
  size_t previous_end = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    const AdamSegment& s = segments[i];
    if (s.begin > s.end || s.end > count || s.begin < previous_end) {
      refuse(i, "[" + std::to_string(s.begin) + ", " + std::to_string(s.end) + ") must lie in [" +
                    std::to_string(previous_end) + ", " + std::to_string(count) +
                    "): after the segment before it, inside the planes");
    }
    if (s.step < 1) refuse(i, "step must be at least 1, got " + std::to_string(s.step));
    check_number(i, "lr", s.lr, std::isfinite(s.lr), "finite");
    check_number(i, "beta1", s.beta1, s.beta1 >= 0 && s.beta1 < 1, "in [0, 1)");
    check_number(i, "beta2", s.beta2, s.beta2 >= 0 && s.beta2 < 1, "in [0, 1)");
    check_number(i, "eps", s.eps, std::isfinite(s.eps) && s.eps >= 0, "finite and not negative");
    check_number(i, "weight_decay", s.weight_decay, std::isfinite(s.weight_decay), "finite");
    previous_end = s.end;
  }
}

void check_blocks(std::span<const AdamSegment> segments) {
  size_t free_from = 0;  // the first block that no segment before holds a part of
  for (size_t i = 0; i < segments.size(); ++i) {
    const AdamSegment& s = segments[i];
    if (s.begin == s.end) continue;
    if (s.begin % kStateBlock != 0 || s.begin < free_from) {
      refuse(i, "begin " + std::to_string(s.begin) + " must be a multiple of " + std::to_string(kStateBlock) +
                    ", in a block after the segment before: int8 moments share scales");
    }
    free_from = (s.end + kStateBlock - 1) / kStateBlock * kStateBlock;
  }
}

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

// Where the work that begins here must end: at a multiple of kBlockElements, so that any cut into segments
// makes the same work, and where the noise needs new keys. A block of the state format is not cut for that:
// all its elements use the keys of its first.
size_t work_end(size_t begin, uint64_t element, StateFormat format) {
  const size_t end = (begin / kBlockElements + 1) * kBlockElements;
  const uint64_t same_keys = (uint64_t{1} << 32) - (element & 0xFFFFFFFF);
  if (same_keys >= end - begin) return end;
  const size_t unit = format == StateFormat::kInt8 ? kStateBlock : 1;
  return begin + (static_cast<size_t>(same_keys) + unit - 1) / unit * unit;
}

// The one place where hyper-parameters lose their double precision; offload/optim/coefficients.py repeats it
// for other devices.
AdamCoefficients make_coefficients(const AdamSegment& s, const AdamOptions& options, StateFormat format) {
  const auto step = static_cast<double>(s.step);
  const double bias1 = 1 - std::pow(s.beta1, step);
  const double bias2_sqrt = std::sqrt(1 - std::pow(s.beta2, step));
  const double folded = format == StateFormat::kFp32 ? 1 : bias2_sqrt;
  const double lerp_weight = 1 - s.beta1;
  const bool lerp_from_grad = lerp_weight >= 0.5;
  return {
      .grad_scale = static_cast<float>(options.grad_scale),
      .keep = options.decoupled ? static_cast<float>(1 - s.lr * s.weight_decay) : 1.0F,
      .decay_into_grad = options.decoupled ? 0.0F : static_cast<float>(s.weight_decay),
      .lerp_weight = static_cast<float>(lerp_from_grad ? lerp_weight - 1 : lerp_weight),
      .lerp_from_grad = lerp_from_grad,
      .beta2 = static_cast<float>(s.beta2),
      .one_minus_beta2 = static_cast<float>(1 - s.beta2),
      .bias2_sqrt = static_cast<float>(bias2_sqrt),
      .eps = static_cast<float>(s.eps * folded),
      .step_size = static_cast<float>(s.lr / bias1 * folded),
  };
}

}  // namespace

void adam_update(const KernelTable& kernels, AdamFormats formats, const AdamPlanes& planes, size_t count,
                 std::span<const AdamSegment> segments, const AdamOptions& options) {
  check_segments(segments, count);
  if (formats.state == StateFormat::kInt8) check_blocks(segments);
  std::vector<AdamCoefficients> coefficients;
  std::vector<Work> work;
  coefficients.reserve(segments.size());
  work.reserve(segments.size() + count / kBlockElements + 1);
  for (size_t i = 0; i < segments.size(); ++i) {
    const AdamSegment& s = segments[i];
    coefficients.push_back(make_coefficients(s, options, formats.state));
    for (size_t begin = s.begin; begin < s.end;) {
      const uint64_t element = s.element + (begin - s.begin);
      const size_t end = std::min(work_end(begin, element, formats.state), s.end);
      work.push_back({begin, end, i, make_noise_keys(options.seed, s.step, element, begin)});
      begin = end;
    }
  }
  const KernelTable::Adam adam =
      kernels.adam[static_cast<size_t>(formats.state)][static_cast<size_t>(formats.others)];
  ThreadPool::shared().run(work.size(), options.threads, [&](size_t index) {
    const IeeeDefaults ieee_defaults;
    const Work& part = work[index];
    adam(coefficients[part.segment], part.noise, planes, part.begin, part.end);
  });
}

}  // namespace offload::optim

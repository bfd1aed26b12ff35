#include "optim/adam.h"

#include <cmath>
#include <string>
#include <vector>

#include "optim/blocks.h"

namespace offload::optim {
namespace {

void check_segments(std::span<const AdamSegment> segments, size_t count) {
  size_t previous_end = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    const AdamSegment& s = segments[i];
    check_span(i, s, previous_end, count);
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
    append_work(work, i, s, options.seed, formats.state == StateFormat::kInt8 ? kStateBlock : 1);
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

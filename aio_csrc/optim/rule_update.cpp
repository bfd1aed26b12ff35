#include "optim/rule_update.h"

#include <cmath>
#include <vector>

#include "optim/blocks.h"

namespace offload::optim {
namespace {

// What a segment's numbers become. The one place where they lose their double precision.
struct Step {
  Rule rule;
  RuleCoefficients coefficients;
};

void check_finite(size_t index, const char* name, double value) {
  check_number(index, name, value, std::isfinite(value), "finite");
}

void check_not_negative(size_t index, const char* name, double value) {
  check_number(index, name, value, std::isfinite(value) && value >= 0, "finite and not negative");
}

void check_beta(size_t index, const char* name, double value) {
  check_number(index, name, value, value >= 0 && value < 1, "in [0, 1)");
}

Step make_step(size_t index, const LionSegment& s, float grad_scale) {
  check_finite(index, "lr", s.lr);
  check_beta(index, "beta1", s.beta1);
  check_beta(index, "beta2", s.beta2);
  check_finite(index, "weight_decay", s.weight_decay);
  return {.rule = Rule::kLion,
          .coefficients = {.grad_scale = grad_scale,
                           .rate = static_cast<float>(s.lr),
                           .keep = static_cast<float>(1 - s.lr * s.weight_decay),
                           .mix_old = static_cast<float>(s.beta1),
                           .mix_new = static_cast<float>(1 - s.beta1),
                           .old = static_cast<float>(s.beta2),
                           .fresh = static_cast<float>(1 - s.beta2)}};
}

Step make_step(size_t index, const AdagradSegment& s, float grad_scale) {
  check_finite(index, "lr", s.lr);
  check_not_negative(index, "lr_decay", s.lr_decay);
  check_not_negative(index, "eps", s.eps);
  check_finite(index, "weight_decay", s.weight_decay);
  check_not_negative(index, "initial_accumulator_value", s.initial_accumulator_value);
  const double decayed = s.lr / (1 + static_cast<double>(s.step - 1) * s.lr_decay);
  return {.rule = Rule::kAdagrad,
          .coefficients = {.grad_scale = grad_scale,
                           .rate = static_cast<float>(decayed),
                           .decay_into_grad = static_cast<float>(s.weight_decay),
                           .eps = static_cast<float>(s.eps),
                           .initial = static_cast<float>(s.initial_accumulator_value),
                           .is_first = s.step == 1}};
}

Step make_step(size_t index, const SgdSegment& s, float grad_scale) {
  check_finite(index, "lr", s.lr);
  check_not_negative(index, "momentum", s.momentum);
  check_finite(index, "dampening", s.dampening);
  check_finite(index, "weight_decay", s.weight_decay);
  return {.rule = s.momentum == 0 ? Rule::kSgd : Rule::kMomentum,
          .coefficients = {.grad_scale = grad_scale,
                           .rate = static_cast<float>(s.lr),
                           .decay_into_grad = static_cast<float>(s.weight_decay),
                           .old = static_cast<float>(s.momentum),
                           .fresh = static_cast<float>(1 - s.dampening),
                           .is_first = s.step == 1,
                           .nesterov = s.nesterov}};
}

template <class Segment>
void update(const RuleTable& rules, const AdamPlanes& planes, size_t count, std::span<const Segment> segments,
            const RuleOptions& options) {
  std::vector<Step> steps;
  std::vector<Work> work;
  steps.reserve(segments.size());
  work.reserve(segments.size() + count / kBlockElements + 1);
  size_t previous_end = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    check_span(i, segments[i], previous_end, count);
    previous_end = segments[i].end;
    steps.push_back(make_step(i, segments[i], static_cast<float>(options.grad_scale)));
    append_work(work, i, segments[i], options.seed, 1);
  }
  const RuleTable::Formats* by_rule = options.moment == StateFormat::kFp32 ? rules.fp32 : rules.bf16;
  ThreadPool::shared().run(work.size(), options.threads, [&](size_t index) {
    const IeeeDefaults ieee_defaults;
    const Work& part = work[index];
    const Step& step = steps[part.segment];
    const auto run = by_rule[static_cast<size_t>(step.rule)].of[static_cast<size_t>(options.planes)];
    run(step.coefficients, part.noise, planes, part.begin, part.end);
  });
}

}  // namespace

void lion_update(const RuleTable& rules, const AdamPlanes& planes, size_t count,
                 std::span<const LionSegment> segments, const RuleOptions& options) {
  update(rules, planes, count, segments, options);
}

void adagrad_update(const RuleTable& rules, const AdamPlanes& planes, size_t count,
                    std::span<const AdagradSegment> segments, const RuleOptions& options) {
  update(rules, planes, count, segments, options);
}

void sgd_update(const RuleTable& rules, const AdamPlanes& planes, size_t count,
                std::span<const SgdSegment> segments, const RuleOptions& options) {
  update(rules, planes, count, segments, options);
}

}  // namespace offload::optim

// The loops of Lion, Adagrad and SGD for one instruction set: the optimizers with at most one moment.
#pragma once

#include "optim/kernel_table.h"

namespace offload::optim {

// kSgd has no momentum, and so no moment.
enum class Rule : uint8_t { kLion, kAdagrad, kMomentum, kSgd };
inline constexpr size_t kRuleCount = 4;

// The coefficients of one step, in the precision of the loop. A rule reads those that it has.
struct RuleCoefficients {
  float grad_scale = 1;
  float rate = 0;             // lr; of Adagrad lr / (1 + (step - 1) * lr_decay)
  float decay_into_grad = 0;  // weight_decay of Adagrad and SGD
  float keep = 1;             // 1 - lr * weight_decay of Lion
  float mix_old = 0;          // Lion's update is the sign of mix_old * moment + mix_new * gradient
  float mix_new = 0;
  float old = 0;  // the moment becomes old * moment + fresh * gradient
  float fresh = 0;
  float eps = 0;
  float initial = 0;      // Adagrad's sum before step 1
  bool is_first = false;  // step 1, which does not read the moment
  bool nesterov = false;
};

// The moment, whatever its name, is MomentPlanes::exp_avg: float or Bf16, and nothing with kSgd.
struct RuleTable {
  using Update = void (*)(const RuleCoefficients&, const NoiseKeys&, const AdamPlanes&, size_t begin,
                          size_t end);
  struct Formats {
    Update of[kPlaneFormatCount];
  };
  Formats fp32[kRuleCount];  // by the format of the moment
  Formats bf16[kRuleCount];
};

extern const RuleTable kScalarRules;
#if defined(__x86_64__)
extern const RuleTable kAvx2Rules;
extern const RuleTable kAvx512Rules;
#elif defined(__aarch64__)
extern const RuleTable kNeonRules;
#endif

}  // namespace offload::optim

// One step of Lion, Adagrad or SGD over a chunk, on the pool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "optim/rule_table.h"
#include "optim/spans.h"

namespace offload::optim {

struct LionSegment : Span {
  double lr;
  double beta1;
  double beta2;
  double weight_decay;  // decoupled
};

struct AdagradSegment : Span {
  double lr;
  double lr_decay;
  double eps;
  double weight_decay;
  double initial_accumulator_value;  // the sum before step 1
};

// With momentum 0 the moment is neither read nor written.
struct SgdSegment : Span {
  double lr;
  double momentum;
  double dampening;
  double weight_decay;
  bool nesterov;
};

struct RuleOptions {
  StateFormat moment;  // kFp32 or kBf16
  PlaneFormat planes;
  double grad_scale;  // multiplies every gradient first: 1 / loss scale x clip coefficient
  uint64_t seed;      // of stochastic rounding
  unsigned threads;
};

// Updates the elements of all segments in place and touches no other. Throws std::invalid_argument as
// adam_update does. A moment is not read in step 1: Adagrad then starts from its initial value, momentum from
// the gradient.
void lion_update(const RuleTable& rules, const AdamPlanes& planes, size_t count,
                 std::span<const LionSegment> segments, const RuleOptions& options);
void adagrad_update(const RuleTable& rules, const AdamPlanes& planes, size_t count,
                    std::span<const AdagradSegment> segments, const RuleOptions& options);
void sgd_update(const RuleTable& rules, const AdamPlanes& planes, size_t count,
                std::span<const SgdSegment> segments, const RuleOptions& options);

}  // namespace offload::optim

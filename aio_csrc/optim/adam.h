// One Adam or AdamW step over a chunk, on the pool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "optim/kernel_table.h"
#include "optim/spans.h"

namespace offload::optim {

// The bias correction is computed from `step` alone: no state is carried from call to call, so any order of
// calls is right.
struct AdamSegment : Span {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
};

struct AdamFormats {
  StateFormat state;
  PlaneFormat others;
};

struct AdamOptions {
  bool decoupled;     // AdamW; else weight_decay is added to the gradient
  double grad_scale;  // multiplies every gradient first: 1 / loss scale x clip coefficient
  uint64_t seed;      // of stochastic rounding
  unsigned threads;
};

// Updates the elements of all segments in place and touches no other. Segments ascend and do not overlap;
// throws std::invalid_argument, before anything is written, where one is out of order, out of [0, count), has
// a hyper-parameter out of range or cuts a block of the state format that another one also holds.
void adam_update(const KernelTable& kernels, AdamFormats formats, const AdamPlanes& planes, size_t count,
                 std::span<const AdamSegment> segments, const AdamOptions& options);

}  // namespace offload::optim

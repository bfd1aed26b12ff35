// The arithmetic of Lion, Adagrad and SGD, written once over a vector type. As in kernels.h, every operation
// is exact or correctly rounded element by element, and results depend on neither the vector type nor the
// cuts.
#pragma once

#include "optim/kernels.h"
#include "optim/rule_table.h"

namespace offload::optim {
namespace {  // see Note [Internal linkage]

// The one moment, or none. Of the noise the upper half rounds it, as it does Adam's exp_avg.
template <class Element>
struct MomentArray {
  Element* values;
  explicit MomentArray(const MomentPlanes& planes) : values(static_cast<Element*>(planes.exp_avg)) {}
  template <class Vec>
  Vec load(size_t i) const {
    return Vec::load(values + i);
  }
  void prefetch(size_t i) const { __builtin_prefetch(values + i); }
};

struct Fp32Moment : MomentArray<float> {
  using MomentArray::MomentArray;
  static constexpr bool rounds = false;
  template <class Vec>
  void store(size_t i, Vec moment, typename Vec::Bits) const {
    moment.store(values + i);
  }
};

struct Bf16Moment : MomentArray<Bf16> {
  using MomentArray::MomentArray;
  static constexpr bool rounds = true;
  template <class Vec>
  void store(size_t i, Vec moment, typename Vec::Bits noise) const {
    using Bits = typename Vec::Bits;
    const Bits bits = moment.canonical_bits();
    const Bits rounded = round_to_bf16<Vec>(bits & Bits::set(kMagnitude), noise.template shift_right<16>());
    (rounded + (bits & Bits::set(kSign))).high().store(values + i);
  }
};

struct NoMoment {
  static constexpr bool rounds = false;
  explicit NoMoment(const MomentPlanes&) {}
  template <class Vec>
  Vec load(size_t) const {
    return Vec::set(0);
  }
  void prefetch(size_t) const {}
  template <class Vec>
  void store(size_t, Vec, typename Vec::Bits) const {}
};

// -1, 0 or 1; NaN where x is not finite: a weight that moved on by lr would look plausible.
template <class Vec>
Vec sign(Vec x) {
  using Bits = typename Vec::Bits;
  const Bits is_not_zero = Bits::min(x.bits() & Bits::set(kMagnitude), Bits::set(1));
  const Bits one = is_not_zero * Bits::set(0x3F800000);
  return Vec::from_bits(one + (x.bits() & Bits::set(kSign))) + (x - x);
}

// Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", rounded where plain torch rounds that is
// written like the paper's program: two products and a sum for the update, fused multiply-adds in place.
struct Lion {
  template <class Vec>
  static void step(const RuleCoefficients& c, Vec g, Vec& master, Vec& moment) {
    const Vec mixed = moment * Vec::set(c.mix_old) + g * Vec::set(c.mix_new);
    master = Vec::fma(sign(mixed), Vec::set(-c.rate), master * Vec::set(c.keep));
    moment = Vec::fma(g, Vec::set(c.fresh), moment * Vec::set(c.old));
  }
};

// Rounded where torch's fused Adagrad rounds; its unfused one takes MKL's square root (see adam_vectors).
struct Adagrad {
  template <class Vec>
  static void step(const RuleCoefficients& c, Vec g, Vec& master, Vec& moment) {
    moment = Vec::fma(g, g, Vec::choose(c.is_first, Vec::set(c.initial), moment));
    master = master - Vec::set(c.rate) * g / (Vec::sqrt(moment) + Vec::set(c.eps));
  }
};

// Rounded where torch's SGD rounds.
struct Sgd {
  template <class Vec>
  static void step(const RuleCoefficients& c, Vec g, Vec& master, Vec&) {
    master = Vec::fma(g, Vec::set(-c.rate), master);
  }
};

struct Momentum {
  template <class Vec>
  static void step(const RuleCoefficients& c, Vec g, Vec& master, Vec& moment) {
    moment = Vec::choose(c.is_first, g, Vec::fma(g, Vec::set(c.fresh), moment * Vec::set(c.old)));
    Sgd::step(c, c.nesterov ? Vec::fma(moment, Vec::set(c.old), g) : moment, master, moment);
  }
};

// On the whole vectors of [begin, end), in one pass; returns where the rest begins.
template <class Vec, class Update, class Master, class Moment, class Grad>
size_t rule_vectors(const RuleCoefficients c, const NoiseKeys keys, const Master master, const Moment moment,
                    const Grad* __restrict grad, size_t begin, size_t end) {
  using Bits = typename Vec::Bits;
  Bits element = Bits::count_from(keys.first + static_cast<uint32_t>(begin));
  size_t i = begin;
  for (; i + Vec::width <= end; i += Vec::width) {
    master.prefetch(i + kAheadElements);
    moment.prefetch(i + kAheadElements);
    __builtin_prefetch(grad + i + kAheadElements);
    Vec p = master.template load<Vec>(i);
    Vec m = moment.template load<Vec>(i);
    Vec g = Vec::load(grad + i) * Vec::set(c.grad_scale);
    if (c.decay_into_grad != 0) g = Vec::fma(p, Vec::set(c.decay_into_grad), g);
    Update::step(c, g, p, m);
    const Bits noise = Moment::rounds ? hash<Vec>(element, keys) : element;
    element = element + Bits::set(Vec::width);
    moment.store(i, m, noise);
    master.store(i, p, noise);
  }
  return i;
}

template <class Vec, class Update, class Master, class Moment, class Grad>
[[gnu::flatten]] void rule_range(const RuleCoefficients& c, const NoiseKeys& keys, const AdamPlanes& planes,
                                 size_t begin, size_t end) {
  const Master master(planes);
  const Moment moment(planes.moments);
  const auto* grad = static_cast<const Grad*>(planes.grad);
  const size_t rest = rule_vectors<Vec, Update>(c, keys, master, moment, grad, begin, end);
  rule_vectors<VecScalar, Update>(c, keys, master, moment, grad, rest, end);
}

// `Half` is the vector type beside bf16 weights.
template <class Vec, class Half, class Update, class Moment>
constexpr RuleTable::Formats rule_formats() {
  using Split = SplitMaster<int16_t>;
  return {{&rule_range<Half, Update, Split, Moment, Bf16>, &rule_range<Half, Update, Split, Moment, Fp16>,
           &rule_range<Half, Update, Split, Moment, float>,
           &rule_range<Vec, Update, Fp32Master, Moment, Fp16>,
           &rule_range<Vec, Update, Fp32Master, Moment, float>}};
}

// `Narrow` is the vector type for formats that are mostly of 16 bits.
template <class Vec, class Narrow>
constexpr RuleTable make_rule_table() {
  return {
      .fp32 = {rule_formats<Vec, Vec, Lion, Fp32Moment>(), rule_formats<Vec, Vec, Adagrad, Fp32Moment>(),
               rule_formats<Vec, Vec, Momentum, Fp32Moment>(), rule_formats<Vec, Narrow, Sgd, NoMoment>()},
      .bf16 = {rule_formats<Vec, Narrow, Lion, Bf16Moment>(),
               rule_formats<Vec, Narrow, Adagrad, Bf16Moment>(),
               rule_formats<Vec, Narrow, Momentum, Bf16Moment>(), rule_formats<Vec, Narrow, Sgd, NoMoment>()},
  };
}

}  // namespace
}  // namespace offload::optim

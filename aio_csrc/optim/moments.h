// How the moments of Adam are stored: fp32, bf16 or blockwise 8 bits. A format loads both moments of a vector
// and stores them: at once, or, blockwise, when all of a block are known.
#pragma once

#include "optim/kernel_table.h"
#include "optim/vec_scalar.h"

namespace offload::optim {
namespace {  // see Note [Internal linkage]

inline constexpr uint32_t kSign = 0x80000000;
inline constexpr uint32_t kMagnitude = 0x7FFFFFFF;
inline constexpr uint32_t kInfinity = 0x7F800000;
inline constexpr uint32_t kHalfBf16 = 0x80008000;  // noise that rounds both moments to the nearest bf16

struct Fp32Moments {
  static constexpr bool rounds = false;
  float* exp_avg;
  float* exp_avg_sq;
  explicit Fp32Moments(const MomentPlanes& planes)
      : exp_avg(static_cast<float*>(planes.exp_avg)), exp_avg_sq(static_cast<float*>(planes.exp_avg_sq)) {}

  template <class Vec>
  Vec load_m(size_t i) const {
    return Vec::load(exp_avg + i);
  }
  template <class Vec>
  Vec load_v(size_t i) const {
    return Vec::load(exp_avg_sq + i);
  }
  template <class Vec>
  void store(size_t i, Vec m, Vec v, typename Vec::Bits) const {
    m.store(exp_avg + i);
    v.store(exp_avg_sq + i);
  }
  void prefetch(size_t i) const {
    __builtin_prefetch(exp_avg + i);
    __builtin_prefetch(exp_avg_sq + i);
  }
};

// Note [Stochastic rounding]
// With beta2 = 0.999 a step moves exp_avg_sq by 0.1 %, less than half a unit of bf16 or of an 8-bit code:
// rounded to nearest it would stand still. A value is therefore rounded up with the probability of its
// distance from the lower neighbour, which is right on average (Zamirai et al. 2020, "Revisiting BFloat16
// Training"): a uniform random number below one unit is added to the bit pattern, which is then cut. What
// needs no rounding stays as it is. The bits come from one hash per element: the upper ones decide exp_avg,
// the lower ones exp_avg_sq, the last eight the int8 residual; what two uses share is the last of one of
// them.

// 32 random bits per element: the hash "lowbias32" (C. Wellons, hash-prospector), keyed. The second key, in
// the middle, keeps two steps from being shifted copies of one stream.
template <class Vec>
typename Vec::Bits hash(typename Vec::Bits element, NoiseKeys keys) {
  using Bits = typename Vec::Bits;
  Bits x = element ^ Bits::set(keys.before);
  x = (x ^ x.template shift_right<16>()) * Bits::set(0x21F0AAAD) + Bits::set(keys.between);
  x = (x ^ x.template shift_right<15>()) * Bits::set(0xD35A2D97);
  return x ^ x.template shift_right<15>();
}

// The upper half of the fp32 pattern, rounded by adding `noise` < 2^16 to it. A finite value stays finite.
template <class Vec>
typename Vec::Bits round_to_bf16(typename Vec::Bits magnitude, typename Vec::Bits noise) {
  using Bits = typename Vec::Bits;
  return Bits::min(magnitude + noise, Bits::max(magnitude, Bits::set(kInfinity - 1)));
}

struct Bf16Moments {
  static constexpr bool rounds = true;
  Bf16* exp_avg;
  Bf16* exp_avg_sq;
  explicit Bf16Moments(const MomentPlanes& planes)
      : exp_avg(static_cast<Bf16*>(planes.exp_avg)), exp_avg_sq(static_cast<Bf16*>(planes.exp_avg_sq)) {}

  template <class Vec>
  Vec load_m(size_t i) const {
    return Vec::load(exp_avg + i);
  }
  template <class Vec>
  Vec load_v(size_t i) const {
    return Vec::load(exp_avg_sq + i);
  }
  template <class Vec>
  void store(size_t i, Vec m, Vec v, typename Vec::Bits noise) const {
    using Bits = typename Vec::Bits;
    const Bits m_bits = m.canonical_bits();
    const Bits m_magnitude = m_bits & Bits::set(kMagnitude);
    const Bits m_rounded = round_to_bf16<Vec>(m_magnitude, noise.template shift_right<16>());
    (m_rounded + (m_bits & Bits::set(kSign))).high().store(exp_avg + i);
    const Bits v_bits = v.canonical_bits();
    const Bits v_rounded = round_to_bf16<Vec>(v_bits, noise & Bits::set(0xFFFF));
    // Beside a non-zero exp_avg at least the smallest bf16: m / (0 + eps) could be any number.
    const Bits both = Bits::min(Bits::min(m_magnitude, v_bits), Bits::set(1));
    Bits::max(v_rounded, both.template shift_left<16>()).high().store(exp_avg_sq + i);
  }
  void prefetch(size_t i) const {
    __builtin_prefetch(exp_avg + i);
    __builtin_prefetch(exp_avg_sq + i);
  }
};

// Note [Blockwise 8-bit moments]
// 128 elements share two fp32 scales, the largest |m| and the largest sqrt(v) among them (blocks: Dettmers et
// al. 2022, "8-bit Optimizers via Block-wise Quantization"). Within a block a code is companded as speech is
// in ITU-T G.711: with x = |value| in units of the scale and y = x + bias, the code is the exponent and the
// leading mantissa bits of y. Steps are even near zero and grow with the value, zero is exact, the largest
// code is the scale, and coding is integer arithmetic on the bit pattern: no table, no logarithm.
//
//               bias    x at the scale   codes                      step
//   m           16      3952             sign and 7 bits            at most 1/16 of y
//   sqrt(v)     32      8032             8 bits                     at most 1/32 of y
//
// Of v its root is coded (as FlashOptim does): half the exponent range to cover, and rounded stochastically
// the root is right on average, which is what divides the step.
//  - v > 0 never gets code 0: m / (0 + eps) could be any number.
//  - A scale of sqrt(v) is at least 2^-49, unless all are zero, so that the square of code 1 is a normal
//  number.
//  - A scale of m below 2^-100 is stored as zero with all its codes: nothing here is ever denormal.
//  - A NaN or an infinity in a block makes its scale NaN and its codes zero: all of it reads as NaN.
inline constexpr float kScaledM = 3952;
inline constexpr float kScaledRoot = 8032;
inline constexpr float kBiasM = 16;
inline constexpr float kBiasRoot = 32;
inline constexpr int kCutM = 23 - 4;  // mantissa bits below the code's
inline constexpr int kCutRoot = 23 - 5;
inline constexpr uint32_t kFirstM = (127 + 4) << 23;  // bits of kBiasM: code 0
inline constexpr uint32_t kFirstRoot = (127 + 5) << 23;
inline constexpr uint32_t kHalfCodes = 1U << 31 | 1U << (kCutRoot - 1);  // noise that rounds to nearest
inline constexpr uint32_t kSmallestM = (127 - 100) << 23;
inline constexpr uint32_t kSmallestRoot = (127 - 49) << 23;

template <class Vec>
Vec decode_m(typename Vec::Words code, float unit) {
  using Bits = typename Vec::Bits;
  using Words = typename Vec::Words;
  const Words y = code.abs().template shift_left<kCutM - 16>() + Words::set(kFirstM >> 16);
  const Vec x = Vec::fma(Vec::from_bits(Bits::from_high(y)), Vec::set(unit), Vec::set(-kBiasM * unit));
  return Vec::from_bits(x.bits() ^ (Bits::from_high(code) & Bits::set(kSign)));
}

template <class Vec>
Vec decode_root(typename Vec::Words code, float unit) {
  using Bits = typename Vec::Bits;
  using Words = typename Vec::Words;
  const Words y = code.template shift_left<kCutRoot - 16>() + Words::set(kFirstRoot >> 16);
  return Vec::fma(Vec::from_bits(Bits::from_high(y)), Vec::set(unit), Vec::set(-kBiasRoot * unit));
}

// Noise below 2^kCutM. Where the upper half of m is zero, so is the code: m is far below half a unit.
template <class Vec>
typename Vec::Words encode_m(Vec m, float per_unit, typename Vec::Bits noise) {
  using Bits = typename Vec::Bits;
  using Words = typename Vec::Words;
  const Vec magnitude = Vec::from_bits(m.bits() & Bits::set(kMagnitude));
  const Bits y = Vec::fma(magnitude, Vec::set(per_unit), Vec::set(kBiasM)).bits() + noise;
  const Words code = y.template high<kCutM - 16>() - Words::set(kFirstM >> kCutM);
  return Words::min(code, Words::set(127)).negated_where_negative(m.bits().high());
}

// Noise below 2^kCutRoot. May be 256, to be stored as 255. A root that is not zero has an upper half.
template <class Vec>
typename Vec::Words encode_root(Vec root, float per_unit, typename Vec::Bits noise) {
  using Bits = typename Vec::Bits;
  using Words = typename Vec::Words;
  const Bits y = Vec::fma(root, Vec::set(per_unit), Vec::set(kBiasRoot)).bits() + noise;
  const Words code = y.template high<kCutRoot - 16>() - Words::set(kFirstRoot >> kCutRoot);
  return Words::max(code, Words::min(root.bits().high(), Words::set(1)));
}

// The largest of the new moments, as bits without sign: these are ordered like the numbers, NaN above
// infinity above the finite.
template <class Vec>
struct Largest {
  using Bits = typename Vec::Bits;
  Bits m = Bits::set(0);
  Bits root = Bits::set(0);

  void see(Vec new_m, Vec new_root) {
    m = Bits::max(m, new_m.bits() & Bits::set(kMagnitude));
    root = Bits::max(root, new_root.bits());
  }
  // Over the lanes, and over those of another.
  [[nodiscard]] Largest<VecScalar> with(Largest<VecScalar> other) const {
    using One = VecScalar::Bits;
    return {One::max({m.largest()}, other.m), One::max({root.largest()}, other.root)};
  }
};

// One block of int8 moments; indices are those of the planes. A step passes over it twice: the first pass
// keeps the new moments in `scratch` and finds the largest, the second codes them.
template <class Wide>
struct Int8Block {
  struct Scratch {
    alignas(64) float m[kStateBlock];
    alignas(64) float root[kStateBlock];
  };
  int8_t* exp_avg;
  uint8_t* exp_avg_sq;
  float* scales;
  Scratch* scratch;
  size_t begin;
  size_t end;
  float unit_m;
  float unit_root;

  Int8Block(const MomentPlanes& planes, Scratch& values, size_t first, size_t last)
      : exp_avg(static_cast<int8_t*>(planes.exp_avg)),
        exp_avg_sq(static_cast<uint8_t*>(planes.exp_avg_sq)),
        scales(planes.scale + first / kStateBlock * 2),
        scratch(&values),
        begin(first),
        end(last),
        unit_m(scales[0] / kScaledM),
        unit_root(scales[1] / kScaledRoot) {}

  template <class Vec>
  Vec load_m(size_t i) const {
    return decode_m<Vec>(Vec::Words::widen(exp_avg + i), unit_m);
  }
  template <class Vec>
  Vec load_v(size_t i) const {
    const Vec root = decode_root<Vec>(Vec::Words::widen(exp_avg_sq + i), unit_root);
    return root * root;
  }
  template <class Vec>
  void keep(size_t i, Vec m, Vec root) const {
    m.store_scratch(scratch->m + (i - begin));
    root.store_scratch(scratch->root + (i - begin));
  }
  template <class Vec>
  Vec kept_m(size_t i) const {
    return Vec::load_scratch(scratch->m + (i - begin));
  }
  template <class Vec>
  Vec kept_root(size_t i) const {
    return Vec::load_scratch(scratch->root + (i - begin));
  }
};

// What the elements of a block are multiplied by before they are coded.
struct CodesPerUnit {
  float m;
  float root;
};

template <class Wide>
CodesPerUnit store_scales(const Int8Block<Wide>& block, Largest<VecScalar> largest) {
  const auto scale_of = [](uint32_t bits) {
    return __builtin_bit_cast(float, bits < kInfinity ? bits : kCanonicalNan);
  };
  const uint32_t root = largest.root.x;
  block.scales[0] = scale_of(largest.m.x < kSmallestM ? 0 : largest.m.x);
  block.scales[1] = scale_of(root > 0 && root < kSmallestRoot ? kSmallestRoot : root);
  return {block.scales[0] > 0 ? kScaledM / block.scales[0] : 0,
          block.scales[1] > 0 ? kScaledRoot / block.scales[1] : 0};
}

template <class Vec, class Wide>
void store_codes(const Int8Block<Wide>& block, size_t i, CodesPerUnit per_unit, typename Vec::Bits noise) {
  using Bits = typename Vec::Bits;
  encode_m<Vec>(block.template kept_m<Vec>(i), per_unit.m, noise.template shift_right<32 - kCutM>())
      .narrow(block.exp_avg + i);
  encode_root<Vec>(block.template kept_root<Vec>(i), per_unit.root, noise & Bits::set((1U << kCutRoot) - 1))
      .narrow(block.exp_avg_sq + i);
}

// Where the scale is NaN the codes mean nothing; they are zero rather than what NaN happens to give.
template <class Wide>
void clear_codes_without_scale(const Int8Block<Wide>& block) {
  if (block.scales[0] != block.scales[0]) {
    __builtin_memset(block.exp_avg + block.begin, 0, block.end - block.begin);
  }
  if (block.scales[1] != block.scales[1]) {
    __builtin_memset(block.exp_avg_sq + block.begin, 0, block.end - block.begin);
  }
}

}  // namespace
}  // namespace offload::optim

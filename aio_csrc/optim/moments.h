// How the moments of Adam are stored: fp32, bf16 or blockwise 8 bits. Each format is a policy of the Adam
// loop: it loads vectors of both moments, stores them, and has a say where a block begins and ends.
#pragma once

#include "optim/kernel_table.h"
#include "optim/vec_scalar.h"

namespace offload::optim {
namespace {  // see Note [Internal linkage]

inline constexpr uint32_t kSign = 0x80000000;
inline constexpr uint32_t kMagnitude = 0x7FFFFFFF;
inline constexpr uint32_t kInfinity = 0x7F800000;

// The moments of the elements of a vector. `root` is sqrt(v), which the update computes anyway.
template <class Vec>
struct NewMoments {
  Vec m, v, root;
};

struct Fp32Moments {
  static constexpr bool rounds = false;
  static constexpr bool blockwise = false;
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
  void store(size_t i, const NewMoments<Vec>& moments, typename Vec::Bits) {
    moments.m.store(exp_avg + i);
    moments.v.store(exp_avg_sq + i);
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
// the lower ones exp_avg_sq, and those that two uses share are the last of one of them.

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
  static constexpr bool blockwise = false;
  static constexpr uint32_t to_nearest = 0x80008000;  // noise of half a unit
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
  void store(size_t i, const NewMoments<Vec>& moments, typename Vec::Bits noise) {
    using Bits = typename Vec::Bits;
    const Bits m = moments.m.canonical_bits();
    const Bits m_magnitude = m & Bits::set(kMagnitude);
    const Bits m_rounded = round_to_bf16<Vec>(m_magnitude, noise.template shift_right<16>());
    (m_rounded + (m & Bits::set(kSign))).store_high(exp_avg + i);
    const Bits v = moments.v.canonical_bits();
    const Bits v_rounded = round_to_bf16<Vec>(v, noise & Bits::set(0xFFFF));
    // Beside a non-zero exp_avg at least the smallest bf16: m / (0 + eps) could be any number.
    const Bits either_zero = Bits::min(Bits::min(m_magnitude, v), Bits::set(1));
    Bits::max(v_rounded, either_zero.template shift_left<16>()).store_high(exp_avg_sq + i);
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
inline constexpr uint32_t kSmallestM = (127 - 100) << 23;
inline constexpr uint32_t kSmallestRoot = (127 - 49) << 23;

template <class Vec>
Vec decode_m(typename Vec::Bits code, float unit) {
  using Bits = typename Vec::Bits;
  const Vec y = Vec::from_bits(code.abs().template shift_left<kCutM>() + Bits::set(kFirstM));
  const Vec x = Vec::fma(y, Vec::set(unit), Vec::set(-kBiasM * unit));
  return Vec::from_bits(x.bits() ^ (code & Bits::set(kSign)));
}

template <class Vec>
Vec decode_root(typename Vec::Bits code, float unit) {
  using Bits = typename Vec::Bits;
  const Vec y = Vec::from_bits(code.template shift_left<kCutRoot>() + Bits::set(kFirstRoot));
  return Vec::fma(y, Vec::set(unit), Vec::set(-kBiasRoot * unit));
}

// Noise below 2^kCutM.
template <class Vec>
typename Vec::Bits encode_m(Vec m, float per_unit, typename Vec::Bits noise) {
  using Bits = typename Vec::Bits;
  const Vec magnitude = Vec::from_bits(m.bits() & Bits::set(kMagnitude));
  const Bits y = Vec::fma(magnitude, Vec::set(per_unit), Vec::set(kBiasM)).bits();
  const Bits code = (y + noise).template shift_right<kCutM>() - Bits::set(kFirstM >> kCutM);
  return Bits::min(code, Bits::set(127)).negated_where_negative(m.bits());
}

// Noise below 2^kCutRoot. May be 256, to be stored as 255.
template <class Vec>
typename Vec::Bits encode_root(Vec root, float per_unit, typename Vec::Bits noise) {
  using Bits = typename Vec::Bits;
  const Bits y = Vec::fma(root, Vec::set(per_unit), Vec::set(kBiasRoot)).bits();
  const Bits code = (y + noise).template shift_right<kCutRoot>() - Bits::set(kFirstRoot >> kCutRoot);
  return Bits::max(code, Bits::min(root.bits(), Bits::set(1)));
}

template <class Wide>
struct Int8Moments {
  static constexpr bool rounds = true;
  static constexpr bool blockwise = true;
  static constexpr uint32_t to_nearest = 0x80000000 | 1U << (kCutRoot - 1);  // noise of half a unit
  explicit Int8Moments(const MomentPlanes& planes)
      : exp_avg_(static_cast<int8_t*>(planes.exp_avg)),
        exp_avg_sq_(static_cast<uint8_t*>(planes.exp_avg_sq)),
        scale_(planes.scale) {}

  void open_block(size_t begin) {
    begin_ = begin;
    unit_m_ = scale_[begin / kStateBlock * 2] / kScaledM;
    unit_root_ = scale_[begin / kStateBlock * 2 + 1] / kScaledRoot;
  }
  template <class Vec>
  Vec load_m(size_t i) const {
    return decode_m<Vec>(Vec::Bits::load_low(exp_avg_ + i), unit_m_);
  }
  template <class Vec>
  Vec load_v(size_t i) const {
    const Vec root = decode_root<Vec>(Vec::Bits::load_low(exp_avg_sq_ + i), unit_root_);
    return root * root;
  }
  // Keeps the values until the block is complete: then its scales are known.
  template <class Vec>
  void store(size_t i, const NewMoments<Vec>& moments, typename Vec::Bits noise) {
    moments.m.store(m_ + (i - begin_));
    moments.root.store(root_ + (i - begin_));
    noise.store(noise_ + (i - begin_));
  }
  void close_block(size_t end) {
    const size_t count = end - begin_;
    Largest largest;
    find_largest<VecScalar>(find_largest<Wide>(0, count, largest), count, largest);
    float* scales = scale_ + begin_ / kStateBlock * 2;
    scales[0] = scale_of(largest.m < kSmallestM ? 0 : largest.m);
    scales[1] = scale_of(largest.root > 0 && largest.root < kSmallestRoot ? kSmallestRoot : largest.root);
    const float per_unit_m = scales[0] > 0 ? kScaledM / scales[0] : 0;
    const float per_unit_root = scales[1] > 0 ? kScaledRoot / scales[1] : 0;
    encode<VecScalar>(encode<Wide>(0, count, per_unit_m, per_unit_root), count, per_unit_m, per_unit_root);
    if (largest.m >= kInfinity) __builtin_memset(exp_avg_ + begin_, 0, count);
    if (largest.root >= kInfinity) __builtin_memset(exp_avg_sq_ + begin_, 0, count);
  }
  void prefetch(size_t i) const {
    __builtin_prefetch(exp_avg_ + i);
    __builtin_prefetch(exp_avg_sq_ + i);
  }

 private:
  // As bit patterns without sign: these are ordered like the numbers, NaN above infinity above the finite.
  struct Largest {
    uint32_t m = 0;
    uint32_t root = 0;
  };
  static float scale_of(uint32_t largest) {
    return __builtin_bit_cast(float, largest < kInfinity ? largest : kCanonicalNan);
  }
  template <class Vec>
  size_t find_largest(size_t begin, size_t end, Largest& largest) const {
    using Bits = typename Vec::Bits;
    Bits m = Bits::set(largest.m);
    Bits root = Bits::set(largest.root);
    size_t i = begin;
    for (; i + Vec::width <= end; i += Vec::width) {
      m = Bits::max(m, Vec::load(m_ + i).bits() & Bits::set(kMagnitude));
      root = Bits::max(root, Vec::load(root_ + i).bits());
    }
    largest = {m.largest(), root.largest()};
    return i;
  }
  template <class Vec>
  size_t encode(size_t begin, size_t end, float per_unit_m, float per_unit_root) const {
    using Bits = typename Vec::Bits;
    size_t i = begin;
    for (; i + Vec::width <= end; i += Vec::width) {
      const Bits noise = Bits::load(noise_ + i);
      encode_m<Vec>(Vec::load(m_ + i), per_unit_m, noise.template shift_right<32 - kCutM>())
          .store_low(exp_avg_ + begin_ + i);
      encode_root<Vec>(Vec::load(root_ + i), per_unit_root, noise & Bits::set((1U << kCutRoot) - 1))
          .store_low(exp_avg_sq_ + begin_ + i);
    }
    return i;
  }

  int8_t* exp_avg_;
  uint8_t* exp_avg_sq_;
  float* scale_;
  size_t begin_ = 0;
  float unit_m_ = 0;
  float unit_root_ = 0;
  alignas(64) float m_[kStateBlock];
  alignas(64) float root_[kStateBlock];
  alignas(64) uint32_t noise_[kStateBlock];
};

}  // namespace
}  // namespace offload::optim

// Sixteen elements in four NEON registers, in order.
#pragma once

#include <arm_neon.h>

#include "optim/kernel_table.h"

namespace offload::optim {
namespace {  // see Note [Internal linkage]

struct WordsNeon {
  uint16x8_t lo, hi;

  static WordsNeon set(uint16_t value) { return {vdupq_n_u16(value), vdupq_n_u16(value)}; }
  static WordsNeon load(const void* p) {
    const auto* words = static_cast<const uint16_t*>(p);
    return {vld1q_u16(words), vld1q_u16(words + 8)};
  }
  static WordsNeon widen(const int8_t* p) {
    const int8x16_t bytes = vld1q_s8(p);
    return {vreinterpretq_u16_s16(vmovl_s8(vget_low_s8(bytes))), vreinterpretq_u16_s16(vmovl_high_s8(bytes))};
  }
  static WordsNeon widen(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    return {vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)};
  }
  void store(void* p) const {
    auto* words = static_cast<uint16_t*>(p);
    vst1q_u16(words, lo);
    vst1q_u16(words + 8, hi);
  }
  void narrow(int8_t* p) const { vst1q_s8(p, vqmovn_high_s16(vqmovn_s16(signed_lo()), signed_hi())); }
  void narrow(uint8_t* p) const { vst1q_u8(p, vqmovn_high_u16(vqmovn_u16(lo), hi)); }
  friend WordsNeon operator+(WordsNeon a, WordsNeon b) {
    return {vaddq_u16(a.lo, b.lo), vaddq_u16(a.hi, b.hi)};
  }
  friend WordsNeon operator-(WordsNeon a, WordsNeon b) {
    return {vsubq_u16(a.lo, b.lo), vsubq_u16(a.hi, b.hi)};
  }
  template <int count>
  [[nodiscard]] WordsNeon shift_left() const {
    return {vshlq_n_u16(lo, count), vshlq_n_u16(hi, count)};
  }
  template <int count>
  [[nodiscard]] WordsNeon shift_right() const {
    return {vshrq_n_u16(lo, count), vshrq_n_u16(hi, count)};
  }
  static WordsNeon min(WordsNeon a, WordsNeon b) { return {vminq_u16(a.lo, b.lo), vminq_u16(a.hi, b.hi)}; }
  static WordsNeon max(WordsNeon a, WordsNeon b) { return {vmaxq_u16(a.lo, b.lo), vmaxq_u16(a.hi, b.hi)}; }
  [[nodiscard]] WordsNeon abs() const {
    return {vreinterpretq_u16_s16(vabsq_s16(signed_lo())), vreinterpretq_u16_s16(vabsq_s16(signed_hi()))};
  }
  [[nodiscard]] WordsNeon ones_where_negative() const {
    return {vreinterpretq_u16_s16(vshrq_n_s16(signed_lo(), 15)),
            vreinterpretq_u16_s16(vshrq_n_s16(signed_hi(), 15))};
  }
  [[nodiscard]] WordsNeon negated_where_negative(WordsNeon sign) const {
    const WordsNeon ones = sign.ones_where_negative();
    return {vsubq_u16(veorq_u16(lo, ones.lo), ones.lo), vsubq_u16(veorq_u16(hi, ones.hi), ones.hi)};
  }
  static WordsNeon keep_where_equal(WordsNeon a, WordsNeon b, WordsNeon c) {
    return {vandq_u16(a.lo, vceqq_u16(b.lo, c.lo)), vandq_u16(a.hi, vceqq_u16(b.hi, c.hi))};
  }

 private:
  [[nodiscard]] int16x8_t signed_lo() const { return vreinterpretq_s16_u16(lo); }
  [[nodiscard]] int16x8_t signed_hi() const { return vreinterpretq_s16_u16(hi); }
};

// One operation on each of the four registers.
template <class Register, class Operation>
void for_each_register(Register (&result)[4], const Operation& operation) {
  for (int i = 0; i < 4; ++i) result[i] = operation(i);
}

struct BitsNeon {
  using Words = WordsNeon;
  uint32x4_t x[4];

  template <class Operation>
  static BitsNeon each(const Operation& operation) {
    BitsNeon bits;
    for_each_register(bits.x, operation);
    return bits;
  }
  static BitsNeon set(uint32_t value) {
    return each([=](int) { return vdupq_n_u32(value); });
  }
  static BitsNeon count_from(uint32_t first) {
    constexpr uint32_t numbers[4] = {0, 1, 2, 3};
    const uint32x4_t four = vld1q_u32(numbers);
    return each([=](int i) { return vaddq_u32(four, vdupq_n_u32(first + 4 * static_cast<uint32_t>(i))); });
  }
  static BitsNeon from_halves(Words low, Words high) {
    const uint16x8_t pairs[4] = {vzip1q_u16(low.lo, high.lo), vzip2q_u16(low.lo, high.lo),
                                 vzip1q_u16(low.hi, high.hi), vzip2q_u16(low.hi, high.hi)};
    return each([&](int i) { return vreinterpretq_u32_u16(pairs[i]); });
  }
  static BitsNeon from_high(Words high) { return from_halves(Words::set(0), high); }
  [[nodiscard]] Words low() const { return halves(x); }
  template <int count = 0>
  [[nodiscard]] Words high() const {
    const BitsNeon shifted = each([&](int i) { return vshrq_n_u32(x[i], 16 + count); });
    return halves(shifted.x);
  }
  static BitsNeon load_scratch(const uint32_t* p) {
    return each([=](int i) { return vld1q_u32(p + 4 * i); });
  }
  void store_scratch(uint32_t* p) const {
    for (int i = 0; i < 4; ++i) vst1q_u32(p + 4 * i, x[i]);
  }
  friend BitsNeon operator+(BitsNeon a, BitsNeon b) {
    return each([&](int i) { return vaddq_u32(a.x[i], b.x[i]); });
  }
  friend BitsNeon operator*(BitsNeon a, BitsNeon b) {
    return each([&](int i) { return vmulq_u32(a.x[i], b.x[i]); });
  }
  friend BitsNeon operator^(BitsNeon a, BitsNeon b) {
    return each([&](int i) { return veorq_u32(a.x[i], b.x[i]); });
  }
  friend BitsNeon operator&(BitsNeon a, BitsNeon b) {
    return each([&](int i) { return vandq_u32(a.x[i], b.x[i]); });
  }
  template <int count>
  [[nodiscard]] BitsNeon shift_left() const {
    return each([&](int i) { return vshlq_n_u32(x[i], count); });
  }
  template <int count>
  [[nodiscard]] BitsNeon shift_right() const {
    return each([&](int i) { return vshrq_n_u32(x[i], count); });
  }
  static BitsNeon min(BitsNeon a, BitsNeon b) {
    return each([&](int i) { return vminq_u32(a.x[i], b.x[i]); });
  }
  static BitsNeon max(BitsNeon a, BitsNeon b) {
    return each([&](int i) { return vmaxq_u32(a.x[i], b.x[i]); });
  }
  [[nodiscard]] uint32_t largest() const {
    return vmaxvq_u32(vmaxq_u32(vmaxq_u32(x[0], x[1]), vmaxq_u32(x[2], x[3])));
  }

 private:
  // The lower halves.
  static Words halves(const uint32x4_t (&x)[4]) {
    return {vmovn_high_u32(vmovn_u32(x[0]), x[1]), vmovn_high_u32(vmovn_u32(x[2]), x[3])};
  }
};

struct VecNeon {
  using Bits = BitsNeon;
  using Words = WordsNeon;
  static constexpr size_t width = 16;
  float32x4_t x[4];

  template <class Operation>
  static VecNeon each(const Operation& operation) {
    VecNeon vec;
    for_each_register(vec.x, operation);
    return vec;
  }
  static VecNeon set(float value) {
    return each([=](int) { return vdupq_n_f32(value); });
  }
  static VecNeon load(const float* p) {
    return each([=](int i) { return vld1q_f32(p + 4 * i); });
  }
  static VecNeon load(const Bf16* p) { return from_bits(Bits::from_high(Words::load(p))); }
  static VecNeon load(const Fp16* p) {
    return each([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p[4 * i].bits))); });
  }
  void store(float* p) const {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x[i]);
  }
  static VecNeon load_scratch(const float* p) { return load(p); }
  void store_scratch(float* p) const { store(p); }
  static VecNeon from_bits(Bits bits) {
    return each([&](int i) { return vreinterpretq_f32_u32(bits.x[i]); });
  }
  [[nodiscard]] Bits bits() const {
    return Bits::each([&](int i) { return vreinterpretq_u32_f32(x[i]); });
  }
  [[nodiscard]] Bits canonical_bits() const {
    const uint32x4_t nan = vdupq_n_u32(kCanonicalNan);
    return Bits::each(
        [&](int i) { return vbslq_u32(vceqq_f32(x[i], x[i]), vreinterpretq_u32_f32(x[i]), nan); });
  }

  static VecNeon choose(bool condition, VecNeon a, VecNeon b) { return condition ? a : b; }
  friend VecNeon operator+(VecNeon a, VecNeon b) {
    return each([&](int i) { return vaddq_f32(a.x[i], b.x[i]); });
  }
  friend VecNeon operator-(VecNeon a, VecNeon b) {
    return each([&](int i) { return vsubq_f32(a.x[i], b.x[i]); });
  }
  friend VecNeon operator*(VecNeon a, VecNeon b) {
    return each([&](int i) { return vmulq_f32(a.x[i], b.x[i]); });
  }
  friend VecNeon operator/(VecNeon a, VecNeon b) {
    return each([&](int i) { return vdivq_f32(a.x[i], b.x[i]); });
  }
  static VecNeon fma(VecNeon a, VecNeon b, VecNeon c) {
    return each([&](int i) { return vfmaq_f32(c.x[i], a.x[i], b.x[i]); });
  }
  static VecNeon sqrt(VecNeon a) {
    return each([&](int i) { return vsqrtq_f32(a.x[i]); });
  }

  struct SquareLanes {
    float64x2_t pair[8] = {vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0),
                           vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0)};
    void add(VecNeon value, size_t) {
      for (int i = 0; i < 4; ++i) {
        const float64x2_t low = vcvt_f64_f32(vget_low_f32(value.x[i]));
        const float64x2_t high = vcvt_high_f64_f32(value.x[i]);
        pair[2 * i] = vfmaq_f64(pair[2 * i], low, low);
        pair[2 * i + 1] = vfmaq_f64(pair[2 * i + 1], high, high);
      }
    }
    void store(double* out) const {
      for (int i = 0; i < 8; ++i) vst1q_f64(out + 2 * i, pair[i]);
    }
  };
};

}  // namespace
}  // namespace offload::optim

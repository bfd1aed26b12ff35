// Sixteen elements in one AVX-512 register.
#pragma once

#include "optim/avx512_intrinsics.h"
#include "optim/kernel_table.h"
#include "optim/words_256.h"

namespace offload::optim {
namespace {  // see Note [Internal linkage]

struct BitsAvx512 {
  using Words = Words256;
  __m512i x;

  static BitsAvx512 set(uint32_t value) { return {_mm512_set1_epi32(static_cast<int>(value))}; }
  static BitsAvx512 count_from(uint32_t first) {
    const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return {_mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)), numbers)};
  }
  static BitsAvx512 from_halves(Words low, Words high) {
    return {_mm512_or_si512(from_high(high).x, _mm512_cvtepu16_epi32(low.x))};
  }
  static BitsAvx512 from_high(Words high) { return {_mm512_slli_epi32(_mm512_cvtepu16_epi32(high.x), 16)}; }
  [[nodiscard]] Words low() const { return {_mm512_cvtepi32_epi16(x)}; }
  template <int count = 0>
  [[nodiscard]] Words high() const {
    return {_mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16 + count))};
  }
  static BitsAvx512 load_scratch(const uint32_t* p) { return {_mm512_load_si512(p)}; }
  void store_scratch(uint32_t* p) const { _mm512_store_si512(p, x); }
  friend BitsAvx512 operator+(BitsAvx512 a, BitsAvx512 b) { return {_mm512_add_epi32(a.x, b.x)}; }
  friend BitsAvx512 operator*(BitsAvx512 a, BitsAvx512 b) { return {_mm512_mullo_epi32(a.x, b.x)}; }
  friend BitsAvx512 operator^(BitsAvx512 a, BitsAvx512 b) { return {_mm512_xor_si512(a.x, b.x)}; }
  friend BitsAvx512 operator&(BitsAvx512 a, BitsAvx512 b) { return {_mm512_and_si512(a.x, b.x)}; }
  template <int count>
  [[nodiscard]] BitsAvx512 shift_left() const {
    return {_mm512_slli_epi32(x, count)};
  }
  template <int count>
  [[nodiscard]] BitsAvx512 shift_right() const {
    return {_mm512_srli_epi32(x, count)};
  }
  static BitsAvx512 min(BitsAvx512 a, BitsAvx512 b) { return {_mm512_min_epu32(a.x, b.x)}; }
  static BitsAvx512 max(BitsAvx512 a, BitsAvx512 b) { return {_mm512_max_epu32(a.x, b.x)}; }
  [[nodiscard]] uint32_t largest() const { return _mm512_reduce_max_epu32(x); }
};

struct VecAvx512 {
  using Bits = BitsAvx512;
  using Words = Words256;
  static constexpr size_t width = 16;
  __m512 x;

  static VecAvx512 set(float value) { return {_mm512_set1_ps(value)}; }
  static VecAvx512 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static VecAvx512 load(const Bf16* p) { return from_bits(Bits::from_high(Words::load(p))); }
  static VecAvx512 load(const Fp16* p) { return {_mm512_cvtph_ps(Words::load(p).x)}; }
  void store(float* p) const { _mm512_storeu_ps(p, x); }
  static VecAvx512 load_scratch(const float* p) { return {_mm512_load_ps(p)}; }
  void store_scratch(float* p) const { _mm512_store_ps(p, x); }
  static VecAvx512 from_bits(Bits bits) { return {_mm512_castsi512_ps(bits.x)}; }
  [[nodiscard]] Bits bits() const { return {_mm512_castps_si512(x)}; }
  Bits canonical_bits() const {
    const __m512i nan = _mm512_set1_epi32(kCanonicalNan);
    return {_mm512_mask_mov_epi32(_mm512_castps_si512(x), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan)};
  }

  static VecAvx512 choose(bool condition, VecAvx512 a, VecAvx512 b) { return {condition ? a.x : b.x}; }
  friend VecAvx512 operator+(VecAvx512 a, VecAvx512 b) { return {_mm512_add_ps(a.x, b.x)}; }
  friend VecAvx512 operator-(VecAvx512 a, VecAvx512 b) { return {_mm512_sub_ps(a.x, b.x)}; }
  friend VecAvx512 operator*(VecAvx512 a, VecAvx512 b) { return {_mm512_mul_ps(a.x, b.x)}; }
  friend VecAvx512 operator/(VecAvx512 a, VecAvx512 b) { return {_mm512_div_ps(a.x, b.x)}; }
  static VecAvx512 fma(VecAvx512 a, VecAvx512 b, VecAvx512 c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
  static VecAvx512 sqrt(VecAvx512 a) { return {_mm512_sqrt_ps(a.x)}; }

  struct SquareLanes {
    __m512d low = _mm512_setzero_pd();
    __m512d high = _mm512_setzero_pd();
    void add(VecAvx512 value, size_t) {
      const __m512d low_wide = _mm512_cvtps_pd(_mm512_castps512_ps256(value.x));
      const __m512d high_wide = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value.x, 1));
      low = _mm512_fmadd_pd(low_wide, low_wide, low);
      high = _mm512_fmadd_pd(high_wide, high_wide, high);
    }
    void store(double* out) const {
      _mm512_storeu_pd(out, low);
      _mm512_storeu_pd(out + 8, high);
    }
  };
};

}  // namespace
}  // namespace offload::optim

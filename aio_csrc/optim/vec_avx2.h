// Sixteen elements in two AVX2 registers each: a full register of 16-bit elements, and two independent
// chains for the latency of sqrt and division.
#pragma once

#include <immintrin.h>

#include "optim/kernel_table.h"

namespace offload::optim {
namespace {  // see Note [Internal linkage]

struct BitsAvx2 {
  __m256i lo, hi;

  static BitsAvx2 set(uint32_t value) {
    const __m256i x = _mm256_set1_epi32(static_cast<int>(value));
    return {x, x};
  }
  static BitsAvx2 count_from(uint32_t first) {
    const __m256i x = _mm256_set1_epi32(static_cast<int>(first));
    return {_mm256_add_epi32(x, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
            _mm256_add_epi32(x, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
  }
  static BitsAvx2 load(const uint32_t* p) {
    const auto* halves = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
  }
  static BitsAvx2 load_high(const Bf16* p) {
    const auto* halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)), 16),
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1)), 16)};
  }
  static BitsAvx2 load_low(const int16_t* p) {
    const auto* halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepi16_epi32(_mm_loadu_si128(halves)),
            _mm256_cvtepi16_epi32(_mm_loadu_si128(halves + 1))};
  }
  static BitsAvx2 load_low(const int8_t* p) {
    return {_mm256_cvtepi8_epi32(load_8(p)), _mm256_cvtepi8_epi32(load_8(p + 8))};
  }
  static BitsAvx2 load_low(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(load_8(p)), _mm256_cvtepu8_epi32(load_8(p + 8))};
  }
  void store(uint32_t* p) const {
    auto* halves = reinterpret_cast<__m256i*>(p);
    _mm256_storeu_si256(halves, lo);
    _mm256_storeu_si256(halves + 1, hi);
  }
  void store_high(Bf16* p) const { store_packed(p, _mm256_srli_epi32(lo, 16), _mm256_srli_epi32(hi, 16)); }
  void store_low(int16_t* p) const {
    const __m256i mask = _mm256_set1_epi32(0xFFFF);
    store_packed(p, _mm256_and_si256(lo, mask), _mm256_and_si256(hi, mask));
  }
  void store_low(int8_t* p) const {
    const __m256i x = packed(_mm256_packs_epi32(lo, hi));
    store_16(p, _mm_packs_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
  }
  void store_low(uint8_t* p) const {
    const __m256i x = packed(_mm256_packs_epi32(lo, hi));
    store_16(p, _mm_packus_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
  }
  friend BitsAvx2 operator+(BitsAvx2 a, BitsAvx2 b) {
    return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
  }
  friend BitsAvx2 operator-(BitsAvx2 a, BitsAvx2 b) {
    return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
  }
  friend BitsAvx2 operator*(BitsAvx2 a, BitsAvx2 b) {
    return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
  }
  friend BitsAvx2 operator^(BitsAvx2 a, BitsAvx2 b) {
    return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
  }
  friend BitsAvx2 operator&(BitsAvx2 a, BitsAvx2 b) {
    return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
  }
  template <int count>
  [[nodiscard]] BitsAvx2 shift_left() const {
    return {_mm256_slli_epi32(lo, count), _mm256_slli_epi32(hi, count)};
  }
  template <int count>
  [[nodiscard]] BitsAvx2 shift_right() const {
    return {_mm256_srli_epi32(lo, count), _mm256_srli_epi32(hi, count)};
  }
  static BitsAvx2 min(BitsAvx2 a, BitsAvx2 b) {
    return {_mm256_min_epu32(a.lo, b.lo), _mm256_min_epu32(a.hi, b.hi)};
  }
  static BitsAvx2 max(BitsAvx2 a, BitsAvx2 b) {
    return {_mm256_max_epu32(a.lo, b.lo), _mm256_max_epu32(a.hi, b.hi)};
  }
  [[nodiscard]] uint32_t largest() const {
    const __m256i eight = _mm256_max_epu32(lo, hi);
    const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4E));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xB1))));
  }
  [[nodiscard]] BitsAvx2 abs() const { return {_mm256_abs_epi32(lo), _mm256_abs_epi32(hi)}; }
  [[nodiscard]] BitsAvx2 negated_where_negative(BitsAvx2 sign) const {
    return {_mm256_sign_epi32(lo, sign.lo), _mm256_sign_epi32(hi, sign.hi)};
  }
  static BitsAvx2 keep_where_equal(BitsAvx2 a, BitsAvx2 b, BitsAvx2 c) {
    return {_mm256_and_si256(a.lo, _mm256_cmpeq_epi32(b.lo, c.lo)),
            _mm256_and_si256(a.hi, _mm256_cmpeq_epi32(b.hi, c.hi))};
  }

 private:
  // Packing works within 128-bit halves: the middle quarters change places afterwards.
  static constexpr int kSwapMiddle = 0xD8;
  static __m256i packed(__m256i halves) { return _mm256_permute4x64_epi64(halves, kSwapMiddle); }
  static void store_packed(void* p, __m256i low, __m256i high) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), packed(_mm256_packus_epi32(low, high)));
  }
  static __m128i load_8(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
  static void store_16(void* p, __m128i bytes) { _mm_storeu_si128(static_cast<__m128i*>(p), bytes); }
};

struct VecAvx2 {
  using Bits = BitsAvx2;
  static constexpr size_t width = 16;
  __m256 lo, hi;

  static VecAvx2 set(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static VecAvx2 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static VecAvx2 load(const Bf16* p) { return from_bits(Bits::load_high(p)); }
  void store(float* p) const {
    _mm256_storeu_ps(p, lo);
    _mm256_storeu_ps(p + 8, hi);
  }
  static VecAvx2 from_bits(Bits bits) { return {_mm256_castsi256_ps(bits.lo), _mm256_castsi256_ps(bits.hi)}; }
  [[nodiscard]] Bits bits() const { return {_mm256_castps_si256(lo), _mm256_castps_si256(hi)}; }
  Bits canonical_bits() const {
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(kCanonicalNan));
    const __m256 low = _mm256_blendv_ps(lo, nan, _mm256_cmp_ps(lo, lo, _CMP_UNORD_Q));
    const __m256 high = _mm256_blendv_ps(hi, nan, _mm256_cmp_ps(hi, hi, _CMP_UNORD_Q));
    return {_mm256_castps_si256(low), _mm256_castps_si256(high)};
  }

  friend VecAvx2 operator-(VecAvx2 a, VecAvx2 b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
  }
  friend VecAvx2 operator*(VecAvx2 a, VecAvx2 b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
  }
  friend VecAvx2 operator/(VecAvx2 a, VecAvx2 b) {
    return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
  }
  static VecAvx2 fma(VecAvx2 a, VecAvx2 b, VecAvx2 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  }
  static VecAvx2 sqrt(VecAvx2 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }

  struct SquareLanes {
    __m256d quarter[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
    void add(VecAvx2 value, size_t) {
      add_quarter(0, _mm256_castps256_ps128(value.lo));
      add_quarter(1, _mm256_extractf128_ps(value.lo, 1));
      add_quarter(2, _mm256_castps256_ps128(value.hi));
      add_quarter(3, _mm256_extractf128_ps(value.hi, 1));
    }
    void add_quarter(size_t i, __m128 value) {
      const __m256d wide = _mm256_cvtps_pd(value);
      quarter[i] = _mm256_fmadd_pd(wide, wide, quarter[i]);
    }
    void store(double* out) const {
      for (size_t i = 0; i < 4; ++i) _mm256_storeu_pd(out + 4 * i, quarter[i]);
    }
  };
};

}  // namespace
}  // namespace offload::optim

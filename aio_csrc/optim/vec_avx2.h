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
  void store_high(Bf16* p) const { store_packed(p, _mm256_srli_epi32(lo, 16), _mm256_srli_epi32(hi, 16)); }
  void store_low(int16_t* p) const {
    const __m256i mask = _mm256_set1_epi32(0xFFFF);
    store_packed(p, _mm256_and_si256(lo, mask), _mm256_and_si256(hi, mask));
  }
  friend BitsAvx2 operator+(BitsAvx2 a, BitsAvx2 b) {
    return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
  }
  static BitsAvx2 keep_where_equal(BitsAvx2 a, BitsAvx2 b, BitsAvx2 c) {
    return {_mm256_and_si256(a.lo, _mm256_cmpeq_epi32(b.lo, c.lo)),
            _mm256_and_si256(a.hi, _mm256_cmpeq_epi32(b.hi, c.hi))};
  }

 private:
  // Packing works within 128-bit halves: the middle quarters change places afterwards.
  static constexpr int kSwapMiddle = 0xD8;
  static void store_packed(void* p, __m256i low, __m256i high) {
    const __m256i x = _mm256_packus_epi32(low, high);
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(x, kSwapMiddle));
  }
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
  Bits canonical_bits() const {
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(kCanonicalNan));
    const __m256 low = _mm256_blendv_ps(lo, nan, _mm256_cmp_ps(lo, lo, _CMP_UNORD_Q));
    const __m256 high = _mm256_blendv_ps(hi, nan, _mm256_cmp_ps(hi, hi, _CMP_UNORD_Q));
    return {_mm256_castps_si256(low), _mm256_castps_si256(high)};
  }

  friend VecAvx2 operator+(VecAvx2 a, VecAvx2 b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
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

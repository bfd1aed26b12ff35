// Sixteen elements in one AVX-512 register.
#pragma once

// GCC 12 warns of its own _mm512_undefined_*() placeholders.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "optim/kernel_table.h"

namespace offload::optim {
namespace {  // see Note [Internal linkage]

struct BitsAvx512 {
  __m512i x;

  static BitsAvx512 set(uint32_t value) { return {_mm512_set1_epi32(static_cast<int>(value))}; }
  static BitsAvx512 load_high(const Bf16* p) {
    return {_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_16(p)), 16)};
  }
  static BitsAvx512 load_low(const int16_t* p) { return {_mm512_cvtepi16_epi32(load_16(p))}; }
  void store_high(Bf16* p) const { store_16(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16))); }
  void store_low(int16_t* p) const { store_16(p, _mm512_cvtepi32_epi16(x)); }
  friend BitsAvx512 operator+(BitsAvx512 a, BitsAvx512 b) { return {_mm512_add_epi32(a.x, b.x)}; }
  static BitsAvx512 keep_where_equal(BitsAvx512 a, BitsAvx512 b, BitsAvx512 c) {
    return {_mm512_maskz_mov_epi32(_mm512_cmpeq_epi32_mask(b.x, c.x), a.x)};
  }

 private:
  static __m256i load_16(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void store_16(void* p, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(p), value); }
};

struct VecAvx512 {
  using Bits = BitsAvx512;
  static constexpr size_t width = 16;
  __m512 x;

  static VecAvx512 set(float value) { return {_mm512_set1_ps(value)}; }
  static VecAvx512 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static VecAvx512 load(const Bf16* p) { return from_bits(Bits::load_high(p)); }
  void store(float* p) const { _mm512_storeu_ps(p, x); }
  static VecAvx512 from_bits(Bits bits) { return {_mm512_castsi512_ps(bits.x)}; }
  Bits canonical_bits() const {
    const __m512i nan = _mm512_set1_epi32(kCanonicalNan);
    return {_mm512_mask_mov_epi32(_mm512_castps_si512(x), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan)};
  }

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

// Thirty-two elements in two AVX-512 registers, one with the even and one with the odd ones: a full register
// of 16-bit elements, taken apart and put together with one shift and one mask.
#pragma once

#include "optim/avx512_intrinsics.h"
#include "optim/kernel_table.h"
#include "optim/words_512.h"

namespace offload::optim {
namespace {  // see Note [Internal linkage]

struct BitsAvx512Pairs {
  using Words = Words512;
  __m512i even, odd;

  static BitsAvx512Pairs set(uint32_t value) {
    const __m512i x = _mm512_set1_epi32(static_cast<int>(value));
    return {x, x};
  }
  static BitsAvx512Pairs count_from(uint32_t first) {
    const __m512i x = _mm512_set1_epi32(static_cast<int>(first));
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return {_mm512_add_epi32(x, even), _mm512_add_epi32(x, _mm512_add_epi32(even, _mm512_set1_epi32(1)))};
  }
  static BitsAvx512Pairs from_halves(Words low, Words high) {
    return {_mm512_mask_mov_epi16(_mm512_slli_epi32(high.x, 16), kLow, low.x),
            _mm512_mask_mov_epi16(_mm512_srli_epi32(low.x, 16), kHigh, high.x)};
  }
  static BitsAvx512Pairs from_high(Words high) {
    return {_mm512_slli_epi32(high.x, 16),
            _mm512_and_si512(high.x, _mm512_set1_epi32(static_cast<int>(0xFFFF0000)))};
  }
  [[nodiscard]] Words low() const { return {_mm512_mask_mov_epi16(_mm512_slli_epi32(odd, 16), kLow, even)}; }
  template <int count = 0>
  [[nodiscard]] Words high() const {
    return {_mm512_mask_mov_epi16(_mm512_srli_epi32(even, 16 + count), kHigh, _mm512_srli_epi32(odd, count))};
  }
  friend BitsAvx512Pairs operator+(BitsAvx512Pairs a, BitsAvx512Pairs b) {
    return {_mm512_add_epi32(a.even, b.even), _mm512_add_epi32(a.odd, b.odd)};
  }
  friend BitsAvx512Pairs operator*(BitsAvx512Pairs a, BitsAvx512Pairs b) {
    return {_mm512_mullo_epi32(a.even, b.even), _mm512_mullo_epi32(a.odd, b.odd)};
  }
  friend BitsAvx512Pairs operator^(BitsAvx512Pairs a, BitsAvx512Pairs b) {
    return {_mm512_xor_si512(a.even, b.even), _mm512_xor_si512(a.odd, b.odd)};
  }
  friend BitsAvx512Pairs operator&(BitsAvx512Pairs a, BitsAvx512Pairs b) {
    return {_mm512_and_si512(a.even, b.even), _mm512_and_si512(a.odd, b.odd)};
  }
  template <int count>
  [[nodiscard]] BitsAvx512Pairs shift_left() const {
    return {_mm512_slli_epi32(even, count), _mm512_slli_epi32(odd, count)};
  }
  template <int count>
  [[nodiscard]] BitsAvx512Pairs shift_right() const {
    return {_mm512_srli_epi32(even, count), _mm512_srli_epi32(odd, count)};
  }
  static BitsAvx512Pairs min(BitsAvx512Pairs a, BitsAvx512Pairs b) {
    return {_mm512_min_epu32(a.even, b.even), _mm512_min_epu32(a.odd, b.odd)};
  }
  static BitsAvx512Pairs max(BitsAvx512Pairs a, BitsAvx512Pairs b) {
    return {_mm512_max_epu32(a.even, b.even), _mm512_max_epu32(a.odd, b.odd)};
  }
  [[nodiscard]] uint32_t largest() const { return _mm512_reduce_max_epu32(_mm512_max_epu32(even, odd)); }

 private:
  static constexpr __mmask32 kLow = 0x55555555;
  static constexpr __mmask32 kHigh = 0xAAAAAAAA;
};

struct VecAvx512Pairs {
  using Bits = BitsAvx512Pairs;
  using Words = Words512;
  static constexpr size_t width = 32;
  __m512 even, odd;

  static VecAvx512Pairs set(float value) { return {_mm512_set1_ps(value), _mm512_set1_ps(value)}; }
  static VecAvx512Pairs load(const float* p) { return apart(_mm512_loadu_ps(p), _mm512_loadu_ps(p + 16)); }
  static VecAvx512Pairs load(const Bf16* p) { return from_bits(Bits::from_high(Words::load(p))); }
  static VecAvx512Pairs load(const Fp16* p) {
    const __m512i halves = Words::load(p).x;
    return apart(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)),
                 _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)));
  }
  void store(float* p) const {
    _mm512_storeu_ps(p, _mm512_permutex2var_ps(even, zip(0), odd));
    _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(even, zip(8), odd));
  }
  static VecAvx512Pairs load_scratch(const float* p) { return {_mm512_load_ps(p), _mm512_load_ps(p + 16)}; }
  void store_scratch(float* p) const {
    _mm512_store_ps(p, even);
    _mm512_store_ps(p + 16, odd);
  }
  static VecAvx512Pairs from_bits(Bits bits) {
    return {_mm512_castsi512_ps(bits.even), _mm512_castsi512_ps(bits.odd)};
  }
  [[nodiscard]] Bits bits() const { return {_mm512_castps_si512(even), _mm512_castps_si512(odd)}; }
  Bits canonical_bits() const { return {canonical(even), canonical(odd)}; }

  static VecAvx512Pairs choose(bool condition, VecAvx512Pairs a, VecAvx512Pairs b) {
    return {condition ? a.even : b.even, condition ? a.odd : b.odd};
  }
  friend VecAvx512Pairs operator+(VecAvx512Pairs a, VecAvx512Pairs b) {
    return {_mm512_add_ps(a.even, b.even), _mm512_add_ps(a.odd, b.odd)};
  }
  friend VecAvx512Pairs operator-(VecAvx512Pairs a, VecAvx512Pairs b) {
    return {_mm512_sub_ps(a.even, b.even), _mm512_sub_ps(a.odd, b.odd)};
  }
  friend VecAvx512Pairs operator*(VecAvx512Pairs a, VecAvx512Pairs b) {
    return {_mm512_mul_ps(a.even, b.even), _mm512_mul_ps(a.odd, b.odd)};
  }
  friend VecAvx512Pairs operator/(VecAvx512Pairs a, VecAvx512Pairs b) {
    return {_mm512_div_ps(a.even, b.even), _mm512_div_ps(a.odd, b.odd)};
  }
  static VecAvx512Pairs fma(VecAvx512Pairs a, VecAvx512Pairs b, VecAvx512Pairs c) {
    return {_mm512_fmadd_ps(a.even, b.even, c.even), _mm512_fmadd_ps(a.odd, b.odd, c.odd)};
  }
  static VecAvx512Pairs sqrt(VecAvx512Pairs a) { return {_mm512_sqrt_ps(a.even), _mm512_sqrt_ps(a.odd)}; }

 private:
  static __m512i canonical(__m512 x) {
    const __m512i nan = _mm512_set1_epi32(kCanonicalNan);
    return _mm512_mask_mov_epi32(_mm512_castps_si512(x), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
  }
  // Every second number of `low` and `high`, one after the other.
  static VecAvx512Pairs apart(__m512 low, __m512 high) {
    const Bits numbers = Bits::count_from(0);
    return {_mm512_permutex2var_ps(low, numbers.even, high), _mm512_permutex2var_ps(low, numbers.odd, high)};
  }
  // Picks from the even and the odd numbers in turns, from number `first` on.
  static __m512i zip(int first) {
    const __m512i turns = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_add_epi32(turns, _mm512_set1_epi32(first));
  }
};

}  // namespace
}  // namespace offload::optim

// Sixteen elements in two AVX2 registers each: a full register of 16-bit elements, and two independent
// chains for the latency of sqrt and division.
#pragma once

#include <immintrin.h>

#include "optim/kernel_table.h"
#include "optim/words_256.h"

namespace offload::optim {
namespace {  // see Note [Internal linkage]

// Which elements the two registers hold. In order it is 0 to 7 and 8 to 15: what fp32 arrays want.
struct InOrder {
  static __m256i numbers_lo() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  static __m256i numbers_hi() { return _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15); }
  // Packing works within 128-bit halves: the middle quarters change places before or afterwards.
  static __m256i swap_middle(__m256i x) { return _mm256_permute4x64_epi64(x, 0xD8); }
  static void unpack(__m256i low, __m256i high, __m256i& lo, __m256i& hi) {
    const __m256i low_swapped = swap_middle(low);
    const __m256i high_swapped = swap_middle(high);
    lo = _mm256_unpacklo_epi16(low_swapped, high_swapped);
    hi = _mm256_unpackhi_epi16(low_swapped, high_swapped);
  }
  static void unpack_high(__m256i high, __m256i& lo, __m256i& hi) {
    unpack(_mm256_setzero_si256(), high, lo, hi);
  }
  static __m256i low(__m256i lo, __m256i hi) {
    const __m256i mask = _mm256_set1_epi32(0xFFFF);
    return swap_middle(_mm256_packus_epi32(_mm256_and_si256(lo, mask), _mm256_and_si256(hi, mask)));
  }
  template <int count>
  static __m256i high(__m256i lo, __m256i hi) {
    return swap_middle(
        _mm256_packus_epi32(_mm256_srli_epi32(lo, 16 + count), _mm256_srli_epi32(hi, 16 + count)));
  }
  static void load(const float* p, __m256& lo, __m256& hi) {
    lo = _mm256_loadu_ps(p);
    hi = _mm256_loadu_ps(p + 8);
  }
  // From elements 0 to 7 and 8 to 15.
  static void arrange(__m256&, __m256&) {}
  static void store(float* p, __m256 lo, __m256 hi) {
    _mm256_storeu_ps(p, lo);
    _mm256_storeu_ps(p + 8, hi);
  }
};

// In pairs it is the even and the odd ones: 16-bit arrays are then taken apart and put together with one
// shift and one mask, where packing in order takes four operations, most of them for the same two ports as
// shifts.
struct InPairs {
  static __m256i numbers_lo() { return _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14); }
  static __m256i numbers_hi() { return _mm256_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15); }
  static void unpack(__m256i low, __m256i high, __m256i& lo, __m256i& hi) {
    lo = _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), kOdd);
    hi = _mm256_blend_epi16(_mm256_srli_epi32(low, 16), high, kOdd);
  }
  static void unpack_high(__m256i high, __m256i& lo, __m256i& hi) {
    lo = _mm256_slli_epi32(high, 16);
    hi = _mm256_and_si256(high, _mm256_set1_epi32(static_cast<int>(0xFFFF0000)));
  }
  static __m256i low(__m256i lo, __m256i hi) {
    return _mm256_blend_epi16(lo, _mm256_slli_epi32(hi, 16), kOdd);
  }
  template <int count>
  static __m256i high(__m256i lo, __m256i hi) {
    return _mm256_blend_epi16(_mm256_srli_epi32(lo, 16 + count), _mm256_srli_epi32(hi, count), kOdd);
  }
  static void load(const float* p, __m256& lo, __m256& hi) {
    const __m256 first =
        _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + 8), 1);
    const __m256 second =
        _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p + 4)), _mm_loadu_ps(p + 12), 1);
    lo = _mm256_shuffle_ps(first, second, 0x88);
    hi = _mm256_shuffle_ps(first, second, 0xDD);
  }
  static void arrange(__m256& lo, __m256& hi) {
    const __m256 first = _mm256_permute2f128_ps(lo, hi, 0x20);
    const __m256 second = _mm256_permute2f128_ps(lo, hi, 0x31);
    lo = _mm256_shuffle_ps(first, second, 0x88);
    hi = _mm256_shuffle_ps(first, second, 0xDD);
  }
  static void store(float* p, __m256 lo, __m256 hi) {
    const __m256 first = _mm256_unpacklo_ps(lo, hi);
    const __m256 second = _mm256_unpackhi_ps(lo, hi);
    _mm256_storeu_ps(p, _mm256_permute2f128_ps(first, second, 0x20));
    _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(first, second, 0x31));
  }

 private:
  static constexpr int kOdd = 0xAA;
};

template <class Order>
struct BitsAvx2 {
  using Words = Words256;
  __m256i lo, hi;

  static BitsAvx2 set(uint32_t value) {
    const __m256i x = _mm256_set1_epi32(static_cast<int>(value));
    return {x, x};
  }
  static BitsAvx2 count_from(uint32_t first) {
    const __m256i x = _mm256_set1_epi32(static_cast<int>(first));
    return {_mm256_add_epi32(x, Order::numbers_lo()), _mm256_add_epi32(x, Order::numbers_hi())};
  }
  static BitsAvx2 from_halves(Words low, Words high) {
    BitsAvx2 bits;
    Order::unpack(low.x, high.x, bits.lo, bits.hi);
    return bits;
  }
  static BitsAvx2 from_high(Words high) {
    BitsAvx2 bits;
    Order::unpack_high(high.x, bits.lo, bits.hi);
    return bits;
  }
  [[nodiscard]] Words low() const { return {Order::low(lo, hi)}; }
  template <int count = 0>
  [[nodiscard]] Words high() const {
    return {Order::template high<count>(lo, hi)};
  }
  static BitsAvx2 load_scratch(const uint32_t* p) {
    const auto* halves = reinterpret_cast<const __m256i*>(p);
    return {_mm256_load_si256(halves), _mm256_load_si256(halves + 1)};
  }
  void store_scratch(uint32_t* p) const {
    auto* halves = reinterpret_cast<__m256i*>(p);
    _mm256_store_si256(halves, lo);
    _mm256_store_si256(halves + 1, hi);
  }
  friend BitsAvx2 operator+(BitsAvx2 a, BitsAvx2 b) {
    return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
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
};

template <class Order = InOrder>
struct VecAvx2 {
  using Bits = BitsAvx2<Order>;
  using Words = Words256;
  static constexpr size_t width = 16;
  __m256 lo, hi;

  static VecAvx2 set(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static VecAvx2 load(const float* p) {
    VecAvx2 vec;
    Order::load(p, vec.lo, vec.hi);
    return vec;
  }
  static VecAvx2 load(const Bf16* p) { return from_bits(Bits::from_high(Words::load(p))); }
  static VecAvx2 load(const Fp16* p) {
    const __m256i halves = Words::load(p).x;
    VecAvx2 vec{_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
    Order::arrange(vec.lo, vec.hi);
    return vec;
  }
  void store(float* p) const { Order::store(p, lo, hi); }
  static VecAvx2 load_scratch(const float* p) { return {_mm256_load_ps(p), _mm256_load_ps(p + 8)}; }
  void store_scratch(float* p) const {
    _mm256_store_ps(p, lo);
    _mm256_store_ps(p + 8, hi);
  }
  static VecAvx2 from_bits(Bits bits) { return {_mm256_castsi256_ps(bits.lo), _mm256_castsi256_ps(bits.hi)}; }
  [[nodiscard]] Bits bits() const { return {_mm256_castps_si256(lo), _mm256_castps_si256(hi)}; }
  Bits canonical_bits() const {
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(kCanonicalNan));
    const __m256 low = _mm256_blendv_ps(lo, nan, _mm256_cmp_ps(lo, lo, _CMP_UNORD_Q));
    const __m256 high = _mm256_blendv_ps(hi, nan, _mm256_cmp_ps(hi, hi, _CMP_UNORD_Q));
    return {_mm256_castps_si256(low), _mm256_castps_si256(high)};
  }

  static VecAvx2 choose(bool condition, VecAvx2 a, VecAvx2 b) {
    return {condition ? a.lo : b.lo, condition ? a.hi : b.hi};
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

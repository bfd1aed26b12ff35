// Sixteen 16-bit numbers in one 256-bit register, in the order in which they lie in memory.
#pragma once

#include "optim/kernel_table.h"

namespace offload::optim {
namespace {  // see Note [Internal linkage]

struct Words256 {
  __m256i x;

  static Words256 set(uint16_t value) { return {_mm256_set1_epi16(static_cast<int16_t>(value))}; }
  static Words256 load(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
  static Words256 widen(const int8_t* p) { return {_mm256_cvtepi8_epi16(load_bytes(p))}; }
  static Words256 widen(const uint8_t* p) { return {_mm256_cvtepu8_epi16(load_bytes(p))}; }
  void store(void* p) const { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  void narrow(int8_t* p) const { store_bytes(p, _mm_packs_epi16(lower(), upper())); }
  void narrow(uint8_t* p) const { store_bytes(p, _mm_packus_epi16(lower(), upper())); }
  friend Words256 operator+(Words256 a, Words256 b) { return {_mm256_add_epi16(a.x, b.x)}; }
  friend Words256 operator-(Words256 a, Words256 b) { return {_mm256_sub_epi16(a.x, b.x)}; }
  template <int count>
  [[nodiscard]] Words256 shift_left() const {
    return {_mm256_slli_epi16(x, count)};
  }
  template <int count>
  [[nodiscard]] Words256 shift_right() const {
    return {_mm256_srli_epi16(x, count)};
  }
  static Words256 min(Words256 a, Words256 b) { return {_mm256_min_epu16(a.x, b.x)}; }
  static Words256 max(Words256 a, Words256 b) { return {_mm256_max_epu16(a.x, b.x)}; }
  [[nodiscard]] Words256 abs() const { return {_mm256_abs_epi16(x)}; }
  [[nodiscard]] Words256 ones_where_negative() const { return {_mm256_srai_epi16(x, 15)}; }
  [[nodiscard]] Words256 negated_where_negative(Words256 sign) const {
    return {_mm256_sign_epi16(x, sign.x)};
  }
  static Words256 keep_where_equal(Words256 a, Words256 b, Words256 c) {
    return {_mm256_and_si256(a.x, _mm256_cmpeq_epi16(b.x, c.x))};
  }

 private:
  static __m128i load_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static void store_bytes(void* p, __m128i bytes) { _mm_storeu_si128(static_cast<__m128i*>(p), bytes); }
  [[nodiscard]] __m128i lower() const { return _mm256_castsi256_si128(x); }
  [[nodiscard]] __m128i upper() const { return _mm256_extracti128_si256(x, 1); }
};

}  // namespace
}  // namespace offload::optim

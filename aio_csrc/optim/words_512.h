// Thirty-two 16-bit numbers in one 512-bit register, in the order in which they lie in memory.
#pragma once

#include "optim/avx512_intrinsics.h"
#include "optim/kernel_table.h"

namespace offload::optim {
namespace {  // see Note [Internal linkage]

struct Words512 {
  __m512i x;

  static Words512 set(uint16_t value) { return {_mm512_set1_epi16(static_cast<int16_t>(value))}; }
  static Words512 load(const void* p) { return {_mm512_loadu_si512(p)}; }
  static Words512 widen(const int8_t* p) { return {_mm512_cvtepi8_epi16(load_bytes(p))}; }
  static Words512 widen(const uint8_t* p) { return {_mm512_cvtepu8_epi16(load_bytes(p))}; }
  void store(void* p) const { _mm512_storeu_si512(p, x); }
  void narrow(int8_t* p) const { store_bytes(p, _mm512_cvtsepi16_epi8(x)); }
  void narrow(uint8_t* p) const { store_bytes(p, _mm512_cvtusepi16_epi8(x)); }
  friend Words512 operator+(Words512 a, Words512 b) { return {_mm512_add_epi16(a.x, b.x)}; }
  friend Words512 operator-(Words512 a, Words512 b) { return {_mm512_sub_epi16(a.x, b.x)}; }
  template <int count>
  [[nodiscard]] Words512 shift_left() const {
    return {_mm512_slli_epi16(x, count)};
  }
  template <int count>
  [[nodiscard]] Words512 shift_right() const {
    return {_mm512_srli_epi16(x, count)};
  }
  static Words512 min(Words512 a, Words512 b) { return {_mm512_min_epu16(a.x, b.x)}; }
  static Words512 max(Words512 a, Words512 b) { return {_mm512_max_epu16(a.x, b.x)}; }
  [[nodiscard]] Words512 abs() const { return {_mm512_abs_epi16(x)}; }
  [[nodiscard]] Words512 ones_where_negative() const { return {_mm512_srai_epi16(x, 15)}; }
  [[nodiscard]] Words512 negated_where_negative(Words512 sign) const {
    return {_mm512_mask_sub_epi16(x, _mm512_movepi16_mask(sign.x), _mm512_setzero_si512(), x)};
  }
  static Words512 keep_where_equal(Words512 a, Words512 b, Words512 c) {
    return {_mm512_maskz_mov_epi16(_mm512_cmpeq_epi16_mask(b.x, c.x), a.x)};
  }

 private:
  static __m256i load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void store_bytes(void* p, __m256i bytes) { _mm256_storeu_si256(static_cast<__m256i*>(p), bytes); }
};

}  // namespace
}  // namespace offload::optim

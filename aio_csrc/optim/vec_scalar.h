// One element at a time: the reference for the vector types, and what they use for the tail of an array.
#pragma once

#include <bit>

#include "optim/kernel_table.h"

// Note [Internal linkage]
// This header is compiled once per instruction set. In a named namespace the copies would be one function to
// the linker, which could then keep the AVX-512 copy for everybody. For the same reason the kernel files call
// builtins, not the inline functions of the standard library.
namespace offload::optim {
namespace {

// The 16-bit numbers of a vector.
struct WordsScalar {
  uint16_t x;

  static WordsScalar set(uint16_t value) { return {value}; }
  static WordsScalar load(const Bf16* p) { return {p->bits}; }
  static WordsScalar load(const int16_t* p) { return {static_cast<uint16_t>(*p)}; }
  static WordsScalar widen(const int8_t* p) { return {static_cast<uint16_t>(static_cast<int16_t>(*p))}; }
  static WordsScalar widen(const uint8_t* p) { return {*p}; }
  void store(Bf16* p) const { p->bits = x; }
  void store(int16_t* p) const { *p = static_cast<int16_t>(x); }
  // A value in [-128, 127].
  void narrow(int8_t* p) const { *p = static_cast<int8_t>(static_cast<uint8_t>(x)); }
  // A value in [0, 32767]; beyond 255 it is stored as 255.
  void narrow(uint8_t* p) const { *p = static_cast<uint8_t>(x < 255 ? x : 255); }
  friend WordsScalar operator+(WordsScalar a, WordsScalar b) { return {static_cast<uint16_t>(a.x + b.x)}; }
  friend WordsScalar operator-(WordsScalar a, WordsScalar b) { return {static_cast<uint16_t>(a.x - b.x)}; }
  template <int count>
  [[nodiscard]] WordsScalar shift_left() const {
    return {static_cast<uint16_t>(x << count)};
  }
  template <int count>
  [[nodiscard]] WordsScalar shift_right() const {
    return {static_cast<uint16_t>(x >> count)};
  }
  // Comparisons are of unsigned numbers, signs those of two's complement.
  static WordsScalar min(WordsScalar a, WordsScalar b) { return {a.x < b.x ? a.x : b.x}; }
  static WordsScalar max(WordsScalar a, WordsScalar b) { return {a.x > b.x ? a.x : b.x}; }
  [[nodiscard]] WordsScalar abs() const { return negated_where_negative(*this); }
  [[nodiscard]] WordsScalar ones_where_negative() const { return set(x >> 15 != 0 ? 0xFFFF : 0); }
  // Must be zero where `sign` is: vpsignw.
  [[nodiscard]] WordsScalar negated_where_negative(WordsScalar sign) const {
    return sign.x >> 15 != 0 ? set(0) - *this : *this;
  }
  // a where b == c, else 0
  static WordsScalar keep_where_equal(WordsScalar a, WordsScalar b, WordsScalar c) {
    return set(b.x == c.x ? a.x : 0);
  }
};

struct BitsScalar {
  using Words = WordsScalar;
  uint32_t x;

  static BitsScalar set(uint32_t value) { return {value}; }
  // first, first + 1, first + 2, ... over the elements of the vector
  static BitsScalar count_from(uint32_t first) { return {first}; }
  static BitsScalar from_halves(Words low, Words high) {
    return {static_cast<uint32_t>(high.x) << 16 | low.x};
  }
  static BitsScalar from_high(Words high) { return {static_cast<uint32_t>(high.x) << 16}; }
  [[nodiscard]] Words low() const { return {static_cast<uint16_t>(x)}; }
  // The upper halves, shifted right further by `count`.
  template <int count = 0>
  [[nodiscard]] Words high() const {
    return {static_cast<uint16_t>(x >> (16 + count))};
  }
  // Between a scratch array and registers, in an order that only the vector type knows.
  static BitsScalar load_scratch(const uint32_t* p) { return {*p}; }
  void store_scratch(uint32_t* p) const { *p = x; }
  friend BitsScalar operator+(BitsScalar a, BitsScalar b) { return {a.x + b.x}; }
  friend BitsScalar operator*(BitsScalar a, BitsScalar b) { return {a.x * b.x}; }
  friend BitsScalar operator^(BitsScalar a, BitsScalar b) { return {a.x ^ b.x}; }
  friend BitsScalar operator&(BitsScalar a, BitsScalar b) { return {a.x & b.x}; }
  template <int count>
  [[nodiscard]] BitsScalar shift_left() const {
    return {x << count};
  }
  template <int count>
  [[nodiscard]] BitsScalar shift_right() const {
    return {x >> count};
  }
  static BitsScalar min(BitsScalar a, BitsScalar b) { return {a.x < b.x ? a.x : b.x}; }
  static BitsScalar max(BitsScalar a, BitsScalar b) { return {a.x > b.x ? a.x : b.x}; }
  [[nodiscard]] uint32_t largest() const { return x; }
};

struct VecScalar {
  using Bits = BitsScalar;
  using Words = WordsScalar;
  static constexpr size_t width = 1;
  float x;

  static VecScalar set(float value) { return {value}; }
  static VecScalar load(const float* p) { return {*p}; }
  static VecScalar load(const Bf16* p) { return from_bits(Bits::from_high(Words::load(p))); }
  // Exact. The product moves the exponent to its bias in fp32, of denormals too; above it are infinity and
  // NaN.
  static VecScalar load(const Fp16* p) {
    const uint32_t magnitude = p->bits & 0x7FFF;
    const float finite = __builtin_bit_cast(float, magnitude << 13) * 0x1p112F;
    const uint32_t quiet = magnitude > 0x7C00 ? 0x00400000 : 0;
    const uint32_t bits =
        magnitude < 0x7C00 ? __builtin_bit_cast(uint32_t, finite) : 0x7F800000 | magnitude << 13 | quiet;
    return from_bits({bits | static_cast<uint32_t>(p->bits & 0x8000) << 16});
  }
  void store(float* p) const { *p = x; }
  static VecScalar load_scratch(const float* p) { return {*p}; }
  void store_scratch(float* p) const { *p = x; }
  static VecScalar from_bits(Bits bits) { return {__builtin_bit_cast(float, bits.x)}; }
  [[nodiscard]] Bits bits() const { return {__builtin_bit_cast(uint32_t, x)}; }
  // The bit pattern, with every NaN replaced by the canonical one.
  Bits canonical_bits() const { return {x != x ? kCanonicalNan : __builtin_bit_cast(uint32_t, x)}; }

  static VecScalar choose(bool condition, VecScalar a, VecScalar b) { return {condition ? a.x : b.x}; }
  friend VecScalar operator+(VecScalar a, VecScalar b) { return {a.x + b.x}; }
  friend VecScalar operator-(VecScalar a, VecScalar b) { return {a.x - b.x}; }
  friend VecScalar operator*(VecScalar a, VecScalar b) { return {a.x * b.x}; }
  friend VecScalar operator/(VecScalar a, VecScalar b) { return {a.x / b.x}; }
  static VecScalar fma(VecScalar a, VecScalar b, VecScalar c) { return {__builtin_fmaf(a.x, b.x, c.x)}; }
  static VecScalar sqrt(VecScalar a) { return {__builtin_sqrtf(a.x)}; }

  // Element i of a block goes to lane i % 16 of the sum, in every instruction set.
  struct SquareLanes {
    double lanes[16] = {};
    void add(VecScalar value, size_t i) {
      const double wide = value.x;
      lanes[i % 16] += wide * wide;  // the product of two floats is exact in double: fma or not, same sum
    }
    void store(double* out) const {
      for (size_t lane = 0; lane < 16; ++lane) out[lane] = lanes[lane];
    }
  };
};

}  // namespace
}  // namespace offload::optim

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

struct BitsScalar {
  uint32_t x;

  static BitsScalar set(uint32_t value) { return {value}; }
  static BitsScalar load_high(const Bf16* p) { return {static_cast<uint32_t>(p->bits) << 16}; }
  static BitsScalar load_low(const int16_t* p) { return {static_cast<uint32_t>(static_cast<int32_t>(*p))}; }
  void store_high(Bf16* p) const { p->bits = static_cast<uint16_t>(x >> 16); }
  void store_low(int16_t* p) const { *p = static_cast<int16_t>(static_cast<uint16_t>(x)); }
  friend BitsScalar operator+(BitsScalar a, BitsScalar b) { return {a.x + b.x}; }
  // a where b == c, else 0
  static BitsScalar keep_where_equal(BitsScalar a, BitsScalar b, BitsScalar c) {
    return {b.x == c.x ? a.x : 0U};
  }
};

struct VecScalar {
  using Bits = BitsScalar;
  static constexpr size_t width = 1;
  float x;

  static VecScalar set(float value) { return {value}; }
  static VecScalar load(const float* p) { return {*p}; }
  static VecScalar load(const Bf16* p) { return from_bits(Bits::load_high(p)); }
  void store(float* p) const { *p = x; }
  static VecScalar from_bits(Bits bits) { return {__builtin_bit_cast(float, bits.x)}; }
  // The bit pattern, with every NaN replaced by the canonical one.
  Bits canonical_bits() const { return {x != x ? kCanonicalNan : __builtin_bit_cast(uint32_t, x)}; }

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

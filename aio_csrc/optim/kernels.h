// The arithmetic of all kernels, written once over a vector type. Every function runs whole vectors first and
// the rest with VecScalar; all operations are exact or correctly rounded element by element, so the
// result does not depend on the vector type, nor on where an array is cut.
#pragma once

#include "optim/kernel_table.h"
#include "optim/moments.h"
#include "optim/vec_scalar.h"

namespace offload::optim {
namespace {  // see Note [Internal linkage]

template <class Vec>
Vec join(const Bf16* weight, const int16_t* residual) {
  return Vec::from_bits(Vec::Bits::load_high(weight) + Vec::Bits::load_low(residual));
}

template <class Vec>
Vec join(const Bf16* weight, const int8_t* residual) {
  return Vec::from_bits(Vec::Bits::load_high(weight) +
                        Vec::Bits::load_low(residual).template shift_left<8>());
}

// See Note [Master in two planes].
template <class Vec>
void split(typename Vec::Bits master, Bf16* weight, int16_t* residual) {
  (master + Vec::Bits::set(kHalfUnit)).store_high(weight);
  master.store_low(residual);  // master - (weight << 16), modulo 2^16
}

// Of the lower byte only the carry of rounding is left; it must have been added.
template <class Vec>
void split(typename Vec::Bits master, Bf16* weight, int8_t* residual) {
  (master + Vec::Bits::set(kHalfUnit)).store_high(weight);
  (master.template shift_right<8>() & Vec::Bits::set(0xFF)).store_low(reinterpret_cast<uint8_t*>(residual));
}

// How far the Adam loop reads ahead. The processor's own prefetchers stop at the end of a page, and five
// streams meet one soon; 512 to 2048 bytes of fp32 measured alike.
constexpr size_t kAheadElements = 256;

// Where the fp32 master lies.
template <class Residual>
struct SplitMaster {
  Bf16* weight;
  Residual* residual;
  explicit SplitMaster(const AdamPlanes& planes)
      : weight(static_cast<Bf16*>(planes.weight)), residual(static_cast<Residual*>(planes.residual)) {}
  template <class Vec>
  Vec load(size_t i) const {
    return join<Vec>(weight + i, residual + i);
  }
  void prefetch(size_t i) const {
    __builtin_prefetch(weight + i);
    __builtin_prefetch(residual + i);
  }
  template <class Vec>
  void store(size_t i, Vec master, typename Vec::Bits noise) const {
    using Bits = typename Vec::Bits;
    Bits bits = master.canonical_bits();
    if constexpr (sizeof(Residual) == 1) bits = bits + (noise.template shift_right<16>() & Bits::set(0xFF));
    split<Vec>(bits, weight + i, residual + i);
  }
};

struct Fp32Master {
  float* weight;
  explicit Fp32Master(const AdamPlanes& planes) : weight(static_cast<float*>(planes.weight)) {}
  template <class Vec>
  Vec load(size_t i) const {
    return Vec::load(weight + i);
  }
  void prefetch(size_t i) const { __builtin_prefetch(weight + i); }
  template <class Vec>
  void store(size_t i, Vec master, typename Vec::Bits) const {
    master.store(weight + i);
  }
};

// One Adam step on the whole vectors of [begin, end); returns where the rest begins. Same order of operations
// as torch's single-tensor Adam and AdamW (lerp, addcmul, addcdiv); where torch rounds a product
// before it is added we use one fused multiply-add, and the division by sqrt(1 - beta2^step) is
// a multiplication, so results differ from torch's in the last bits only. The coefficients come by value:
// behind a reference the compiler would load them again after every store to a float plane. The weight is
// updated with the new moments as they are computed; only what is stored of them is rounded.
template <class Vec, class Master, class Moments, class Grad>
size_t adam_vectors(const AdamCoefficients c, const NoiseKeys keys, Master master, Moments& moments,
                    const Grad* __restrict grad, size_t begin, size_t end) {
  using Bits = typename Vec::Bits;
  Bits element = Bits::count_from(keys.first + static_cast<uint32_t>(begin));
  size_t i = begin;
  for (; i + Vec::width <= end; i += Vec::width) {
    master.prefetch(i + kAheadElements);
    moments.prefetch(i + kAheadElements);
    __builtin_prefetch(grad + i + kAheadElements);
    const Bits noise = Moments::rounds ? hash<Vec>(element, keys) : element;
    element = element + Bits::set(Vec::width);
    Vec p = master.template load<Vec>(i);
    Vec g = Vec::load(grad + i) * Vec::set(c.grad_scale);
    if (c.decay_into_grad != 0) g = Vec::fma(p, Vec::set(c.decay_into_grad), g);
    p = p * Vec::set(c.keep);
    const Vec m_old = moments.template load_m<Vec>(i);
    const Vec m = Vec::fma(Vec::set(c.lerp_weight), g - m_old, c.lerp_from_grad ? g : m_old);
    const Vec v_kept = moments.template load_v<Vec>(i) * Vec::set(c.beta2);
    const Vec v = Vec::fma(Vec::set(c.one_minus_beta2) * g, g, v_kept);
    const Vec root = Vec::sqrt(v);
    const Vec denom = Vec::fma(root, Vec::set(c.bias2_sqrt_inverse), Vec::set(c.eps));
    moments.store(i, NewMoments<Vec>{m, v, root}, noise);
    master.store(i, p - Vec::set(c.step_size) * m / denom, noise);
  }
  return i;
}

// Calls run(begin, end) for [begin, end), block by block where the moments are blockwise.
template <class Moments, class Run>
void in_blocks(Moments& moments, size_t begin, size_t end, const Run& run) {
  if constexpr (Moments::blockwise) {
    for (size_t block = begin; block < end; block += kStateBlock) {
      moments.open_block(block);
      run(block, block + kStateBlock < end ? block + kStateBlock : end);
    }
  } else {
    run(begin, end);
  }
}

template <class Vec, class Master, class Moments, class Grad>
void adam_range(const AdamCoefficients& c, const NoiseKeys& keys, const AdamPlanes& planes, size_t begin,
                size_t end) {
  const Master master(planes);
  Moments moments(planes.moments);
  const auto* grad = static_cast<const Grad*>(planes.grad);
  in_blocks(moments, begin, end, [&](size_t from, size_t to) {
    const size_t rest = adam_vectors<Vec>(c, keys, master, moments, grad, from, to);
    adam_vectors<VecScalar>(c, keys, master, moments, grad, rest, to);
    if constexpr (Moments::blockwise) moments.close_block(to);
  });
}

template <class Vec, class Moments>
size_t encode_vectors(const float* exp_avg, const float* exp_avg_sq, Moments& moments, size_t begin,
                      size_t end) {
  size_t i = begin;
  for (; i + Vec::width <= end; i += Vec::width) {
    const Vec v = Vec::load(exp_avg_sq + i);
    moments.store(i, NewMoments<Vec>{Vec::load(exp_avg + i), v, Vec::sqrt(v)},
                  Vec::Bits::set(Moments::to_nearest));
  }
  return i;
}

template <class Vec, class Moments>
void encode_range(const float* exp_avg, const float* exp_avg_sq, const MomentPlanes& planes, size_t begin,
                  size_t end) {
  Moments moments(planes);
  in_blocks(moments, begin, end, [&](size_t from, size_t to) {
    const size_t rest = encode_vectors<Vec>(exp_avg, exp_avg_sq, moments, from, to);
    encode_vectors<VecScalar>(exp_avg, exp_avg_sq, moments, rest, to);
    if constexpr (Moments::blockwise) moments.close_block(to);
  });
}

template <class Vec, class Moments>
size_t decode_vectors(const Moments& moments, float* exp_avg, float* exp_avg_sq, size_t begin, size_t end) {
  size_t i = begin;
  for (; i + Vec::width <= end; i += Vec::width) {
    moments.template load_m<Vec>(i).store(exp_avg + i);
    moments.template load_v<Vec>(i).store(exp_avg_sq + i);
  }
  return i;
}

template <class Vec, class Moments>
void decode_range(const MomentPlanes& planes, float* exp_avg, float* exp_avg_sq, size_t begin, size_t end) {
  Moments moments(planes);
  in_blocks(moments, begin, end, [&](size_t from, size_t to) {
    const size_t rest = decode_vectors<Vec>(moments, exp_avg, exp_avg_sq, from, to);
    decode_vectors<VecScalar>(moments, exp_avg, exp_avg_sq, rest, to);
  });
}

template <class Vec, class Element>
double square_sum(const Element* values, size_t count) {
  typename Vec::SquareLanes vector_lanes;
  size_t i = 0;
  for (; i + Vec::width <= count; i += Vec::width) vector_lanes.add(Vec::load(values + i), i);
  VecScalar::SquareLanes sum;
  vector_lanes.store(sum.lanes);
  for (; i < count; ++i) sum.add(VecScalar::load(values + i), i);
  for (size_t stride = 8; stride > 0; stride /= 2) {
    for (size_t lane = 0; lane < stride; ++lane) sum.lanes[lane] += sum.lanes[lane + stride];
  }
  return sum.lanes[0];
}

template <class Vec, class Residual>
size_t split_vectors(const float* master, Bf16* weight, Residual* residual, size_t begin, size_t end) {
  constexpr uint32_t half_unit = sizeof(Residual) == 1 ? 0x80 : 0;
  size_t i = begin;
  for (; i + Vec::width <= end; i += Vec::width) {
    split<Vec>(Vec::load(master + i).canonical_bits() + Vec::Bits::set(half_unit), weight + i, residual + i);
  }
  return i;
}

template <class Vec, class Residual>
void split_range(const float* master, Bf16* weight, Residual* residual, size_t count) {
  const size_t rest = split_vectors<Vec>(master, weight, residual, 0, count);
  split_vectors<VecScalar>(master, weight, residual, rest, count);
}

template <class Vec, class Residual>
size_t join_vectors(const Bf16* weight, const Residual* residual, float* master, size_t begin, size_t end) {
  size_t i = begin;
  for (; i + Vec::width <= end; i += Vec::width) join<Vec>(weight + i, residual + i).store(master + i);
  return i;
}

template <class Vec, class Residual>
void join_range(const Bf16* weight, const Residual* residual, float* master, size_t count) {
  const size_t rest = join_vectors<Vec>(weight, residual, master, 0, count);
  join_vectors<VecScalar>(weight, residual, master, rest, count);
}

template <class Vec, class Residual>
size_t assign_vectors(Bf16* weight, Residual* residual, const Bf16* fresh, size_t begin, size_t end) {
  using Bits = typename Vec::Bits;
  size_t i = begin;
  for (; i + Vec::width <= end; i += Vec::width) {
    const Bits assigned = Bits::load_high(fresh + i);
    const Bits old_weight = Bits::load_high(weight + i);
    Bits::keep_where_equal(Bits::load_low(residual + i), assigned, old_weight).store_low(residual + i);
    assigned.store_high(weight + i);
  }
  return i;
}

template <class Vec, class Residual>
void assign_range(Bf16* weight, Residual* residual, const Bf16* fresh, size_t count) {
  const size_t rest = assign_vectors<Vec>(weight, residual, fresh, 0, count);
  assign_vectors<VecScalar>(weight, residual, fresh, rest, count);
}

template <class Vec, class Residual>
constexpr MasterKernels<Residual> master_kernels() {
  return {&split_range<Vec, Residual>, &join_range<Vec, Residual>, &assign_range<Vec, Residual>};
}

template <class Vec>
constexpr KernelTable make_kernel_table() {
  using Int8 = Int8Moments<Vec>;
  return {
      .adam = {{&adam_range<Vec, SplitMaster<int16_t>, Fp32Moments, Bf16>,
                &adam_range<Vec, SplitMaster<int16_t>, Fp32Moments, float>,
                &adam_range<Vec, Fp32Master, Fp32Moments, float>},
               {&adam_range<Vec, SplitMaster<int16_t>, Bf16Moments, Bf16>,
                &adam_range<Vec, SplitMaster<int16_t>, Bf16Moments, float>,
                &adam_range<Vec, Fp32Master, Bf16Moments, float>},
               {&adam_range<Vec, SplitMaster<int8_t>, Int8, Bf16>,
                &adam_range<Vec, SplitMaster<int8_t>, Int8, float>, nullptr}},
      .encode_moments = {nullptr, &encode_range<Vec, Bf16Moments>, &encode_range<Vec, Int8>},
      .decode_moments = {nullptr, &decode_range<Vec, Bf16Moments>, &decode_range<Vec, Int8>},
      .square_sum_bf16 = &square_sum<Vec, Bf16>,
      .square_sum_fp32 = &square_sum<Vec, float>,
      .master16 = master_kernels<Vec, int16_t>(),
      .master8 = master_kernels<Vec, int8_t>(),
  };
}

}  // namespace
}  // namespace offload::optim

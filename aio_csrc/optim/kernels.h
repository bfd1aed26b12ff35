// The arithmetic of all kernels, written once over a vector type. Every function runs whole vectors first and
// the rest with VecScalar; all operations are exact or correctly rounded element by element, so the
// result does not depend on the vector type, nor on where an array is cut.
#pragma once

#include "optim/kernel_table.h"
#include "optim/vec_scalar.h"

namespace offload::optim {
namespace {  // see Note [Internal linkage]

template <class Vec>
Vec join(const Bf16* weight, const int16_t* residual) {
  return Vec::from_bits(Vec::Bits::load_high(weight) + Vec::Bits::load_low(residual));
}

// See Note [Master in two planes].
template <class Vec>
void split(Vec master, Bf16* weight, int16_t* residual) {
  const typename Vec::Bits bits = master.canonical_bits();
  (bits + Vec::Bits::set(kHalfUnit)).store_high(weight);
  bits.store_low(residual);  // bits - (weight << 16), modulo 2^16
}

// How far the Adam loop reads ahead. The processor's own prefetchers stop at the end of a page, and five
// streams meet one soon; 512 to 2048 bytes of fp32 measured alike.
constexpr size_t kAheadElements = 256;

// Where the fp32 master lies.
struct SplitMaster {
  Bf16* weight;
  int16_t* residual;
  explicit SplitMaster(const AdamPlanes& planes)
      : weight(static_cast<Bf16*>(planes.weight)), residual(planes.residual) {}
  template <class Vec>
  Vec load(size_t i) const {
    return join<Vec>(weight + i, residual + i);
  }
  void prefetch(size_t i) const {
    __builtin_prefetch(weight + i);
    __builtin_prefetch(residual + i);
  }
  template <class Vec>
  void store(size_t i, Vec master) const {
    split(master, weight + i, residual + i);
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
  void store(size_t i, Vec master) const {
    master.store(weight + i);
  }
};

// One Adam step on the whole vectors of [begin, end); returns where the rest begins. Every operation rounds
// where torch's fused Adam rounds in its vectors, so on fp32 with grad_scale 1 the bits are torch's. (Its
// tail of less than a vector rounds once more; torch's unfused Adam takes MKL's square root, which is not
// rounded correctly.) The coefficients come by value: behind a reference the compiler would load them again
// after every store to a float plane.
template <class Vec, class Master, class Grad>
size_t adam_vectors(const AdamCoefficients c, Master master, float* __restrict exp_avg,
                    float* __restrict exp_avg_sq, const Grad* __restrict grad, size_t begin, size_t end) {
  size_t i = begin;
  for (; i + Vec::width <= end; i += Vec::width) {
    master.prefetch(i + kAheadElements);
    __builtin_prefetch(exp_avg + i + kAheadElements);
    __builtin_prefetch(exp_avg_sq + i + kAheadElements);
    __builtin_prefetch(grad + i + kAheadElements);
    Vec p = master.template load<Vec>(i);
    Vec g = Vec::load(grad + i) * Vec::set(c.grad_scale);
    if (c.decay_into_grad != 0) g = Vec::fma(p, Vec::set(c.decay_into_grad), g);
    p = p * Vec::set(c.keep);
    const Vec m_old = Vec::load(exp_avg + i);
    const Vec m = Vec::fma(Vec::set(c.lerp_weight), g - m_old, c.lerp_from_grad ? g : m_old);
    const Vec v_kept = Vec::load(exp_avg_sq + i) * Vec::set(c.beta2);
    const Vec v = Vec::fma(Vec::set(c.one_minus_beta2) * g, g, v_kept);
    const Vec denom = Vec::sqrt(v) / Vec::set(c.bias2_sqrt) + Vec::set(c.eps);
    m.store(exp_avg + i);
    v.store(exp_avg_sq + i);
    master.store(i, p - Vec::set(c.step_size) * m / denom);
  }
  return i;
}

template <class Vec, class Master, class Grad>
void adam_range(const AdamCoefficients& c, const AdamPlanes& planes, size_t begin, size_t end) {
  const Master master(planes);
  const auto* grad = static_cast<const Grad*>(planes.grad);
  const size_t rest = adam_vectors<Vec>(c, master, planes.exp_avg, planes.exp_avg_sq, grad, begin, end);
  adam_vectors<VecScalar>(c, master, planes.exp_avg, planes.exp_avg_sq, grad, rest, end);
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

template <class Vec>
size_t split_vectors(const float* master, Bf16* weight, int16_t* residual, size_t begin, size_t end) {
  size_t i = begin;
  for (; i + Vec::width <= end; i += Vec::width) split(Vec::load(master + i), weight + i, residual + i);
  return i;
}

template <class Vec>
void split_range(const float* master, Bf16* weight, int16_t* residual, size_t count) {
  const size_t rest = split_vectors<Vec>(master, weight, residual, 0, count);
  split_vectors<VecScalar>(master, weight, residual, rest, count);
}

template <class Vec>
size_t join_vectors(const Bf16* weight, const int16_t* residual, float* master, size_t begin, size_t end) {
  size_t i = begin;
  for (; i + Vec::width <= end; i += Vec::width) join<Vec>(weight + i, residual + i).store(master + i);
  return i;
}

template <class Vec>
void join_range(const Bf16* weight, const int16_t* residual, float* master, size_t count) {
  const size_t rest = join_vectors<Vec>(weight, residual, master, 0, count);
  join_vectors<VecScalar>(weight, residual, master, rest, count);
}

template <class Vec>
size_t assign_vectors(Bf16* weight, int16_t* residual, const Bf16* fresh, size_t begin, size_t end) {
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

template <class Vec>
void assign_range(Bf16* weight, int16_t* residual, const Bf16* fresh, size_t count) {
  const size_t rest = assign_vectors<Vec>(weight, residual, fresh, 0, count);
  assign_vectors<VecScalar>(weight, residual, fresh, rest, count);
}

template <class Vec>
constexpr KernelTable make_kernel_table() {
  return {
      .adam = {&adam_range<Vec, SplitMaster, Bf16>, &adam_range<Vec, SplitMaster, float>,
               &adam_range<Vec, Fp32Master, float>},
      .square_sum_bf16 = &square_sum<Vec, Bf16>,
      .square_sum_fp32 = &square_sum<Vec, float>,
      .split_master = &split_range<Vec>,
      .join_master = &join_range<Vec>,
      .assign_weight = &assign_range<Vec>,
  };
}

}  // namespace
}  // namespace offload::optim

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
  const auto low = Vec::Words::load(residual);
  return Vec::from_bits(Vec::Bits::from_halves(low, Vec::Words::load(weight) + low.ones_where_negative()));
}

template <class Vec>
Vec join(const Bf16* weight, const int8_t* residual) {
  const auto wide = Vec::Words::widen(residual);
  return Vec::from_bits(Vec::Bits::from_halves(wide.template shift_left<8>(),
                                               Vec::Words::load(weight) + wide.ones_where_negative()));
}

// See Note [Master in two planes].
template <class Vec>
void split(typename Vec::Bits master, Bf16* weight, int16_t* residual) {
  (master + Vec::Bits::set(kHalfUnit)).high().store(weight);
  master.low().store(residual);  // master - (weight << 16), modulo 2^16
}

// What rounds the lower byte must have been added.
template <class Vec>
void split(typename Vec::Bits master, Bf16* weight, int8_t* residual) {
  (master + Vec::Bits::set(kHalfUnit)).high().store(weight);
  master.low().template shift_right<8>().narrow(reinterpret_cast<uint8_t*>(residual));
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
    if constexpr (sizeof(Residual) == 1) bits = bits + (noise & Bits::set(0xFF));
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

// One Adam step. Every operation rounds where torch's fused Adam rounds in its vectors, so on fp32 with
// grad_scale 1 the bits are torch's. (Its tail of less than a vector rounds once more; torch's unfused Adam
// takes MKL's square root, which is not rounded correctly.) The master moves by the new moments as they are
// computed; only what is stored of them is rounded. Where it is, no bits are to be torch's, and the division
// by bias2_sqrt is folded into step_size and eps: bf16 moments are updated 15 % faster for it. The
// coefficients come by value: behind a reference the compiler would load them again after every store to a
// float plane.
template <bool usual, class Vec>
Vec new_m(const AdamCoefficients c, Vec g, Vec m) {
  return Vec::fma(Vec::set(c.lerp_weight), g - m, usual ? m : Vec::choose(c.lerp_from_grad, g, m));
}

template <class Vec>
Vec new_v(const AdamCoefficients c, Vec g, Vec v) {
  return Vec::fma(Vec::set(c.one_minus_beta2) * g, g, v * Vec::set(c.beta2));
}

template <bool rounds, class Vec>
Vec new_master(const AdamCoefficients c, Vec p, Vec m, Vec root) {
  const Vec denom = (rounds ? root : root / Vec::set(c.bias2_sqrt)) + Vec::set(c.eps);
  return p * Vec::set(c.keep) - Vec::set(c.step_size) * m / denom;
}

// The gradient, scaled, with the decay of the L2 form.
template <bool usual, class Vec, class Master, class Grad>
Vec whole_gradient(const AdamCoefficients c, const Master master, const Grad* grad, size_t i) {
  const Vec g = Vec::load(grad + i) * Vec::set(c.grad_scale);
  if (usual || c.decay_into_grad == 0) return g;
  return Vec::fma(master.template load<Vec>(i), Vec::set(c.decay_into_grad), g);
}

// Runs the loop without what few runs need: decay into the gradient, and interpolation from it.
template <class Run>
void with_usual(const AdamCoefficients& c, const Run& run) {
  if (c.decay_into_grad == 0 && !c.lerp_from_grad) {
    run.template operator()<true>();
  } else {
    run.template operator()<false>();
  }
}

// On the whole vectors of [begin, end), in one pass; returns where the rest begins.
template <bool usual, class Vec, class Master, class Moments, class Grad>
size_t adam_vectors(const AdamCoefficients c, const NoiseKeys keys, const Master master,
                    const Moments moments, const Grad* __restrict grad, size_t begin, size_t end) {
  using Bits = typename Vec::Bits;
  Bits element = Bits::count_from(keys.first + static_cast<uint32_t>(begin));
  size_t i = begin;
  for (; i + Vec::width <= end; i += Vec::width) {
    master.prefetch(i + kAheadElements);
    moments.prefetch(i + kAheadElements);
    __builtin_prefetch(grad + i + kAheadElements);
    const Vec g = whole_gradient<usual, Vec>(c, master, grad, i);
    const Vec p = master.template load<Vec>(i);
    const Vec m = new_m<usual>(c, g, moments.template load_m<Vec>(i));
    const Vec v = new_v(c, g, moments.template load_v<Vec>(i));
    const Bits noise = Moments::rounds ? hash<Vec>(element, keys) : element;
    element = element + Bits::set(Vec::width);
    moments.store(i, m, v, noise);
    master.store(i, new_master<Moments::rounds>(c, p, m, Vec::sqrt(v)), noise);
  }
  return i;
}

template <class Vec, class Master, class Moments, class Grad>
[[gnu::flatten]] void adam_range(const AdamCoefficients& c, const NoiseKeys& keys, const AdamPlanes& planes,
                                 size_t begin, size_t end) {
  const Master master(planes);
  const Moments moments(planes.moments);
  const auto* grad = static_cast<const Grad*>(planes.grad);
  with_usual(c, [&]<bool usual>() {
    const size_t rest = adam_vectors<usual, Vec>(c, keys, master, moments, grad, begin, end);
    adam_vectors<usual, VecScalar>(c, keys, master, moments, grad, rest, end);
  });
}

// The two passes over a block of int8 moments. The chain from a code to the stored master is too long for the
// processor to work on the next vector meanwhile, and is cut in two by that.
template <bool usual, class Vec, class Master, class Grad, class Block>
size_t first_pass(const AdamCoefficients c, const Master master, const Block block,
                  const Grad* __restrict grad, size_t begin, Largest<VecScalar>& total) {
  Largest<Vec> largest;
  size_t i = begin;
  for (; i + Vec::width <= block.end; i += Vec::width) {
    const Vec g = whole_gradient<usual, Vec>(c, master, grad, i);
    const Vec m = new_m<usual>(c, g, block.template load_m<Vec>(i));
    const Vec root = Vec::sqrt(new_v(c, g, block.template load_v<Vec>(i)));
    largest.see(m, root);
    block.keep(i, m, root);
  }
  total = largest.with(total);
  return i;
}

template <class Vec, class Master, class Block>
size_t second_pass(const AdamCoefficients c, const NoiseKeys keys, const Master master, const Block block,
                   const CodesPerUnit per_unit, size_t begin) {
  using Bits = typename Vec::Bits;
  Bits element = Bits::count_from(keys.first + static_cast<uint32_t>(begin));
  size_t i = begin;
  for (; i + Vec::width <= block.end; i += Vec::width) {
    const Bits noise = hash<Vec>(element, keys);
    element = element + Bits::set(Vec::width);
    const Vec m = block.template kept_m<Vec>(i);
    const Vec root = block.template kept_root<Vec>(i);
    master.store(i, new_master<true>(c, master.template load<Vec>(i), m, root), noise);
    store_codes<Vec>(block, i, per_unit, noise);
  }
  return i;
}

// Calls run(block) for the blocks of [begin, end).
template <class Vec, class Run>
void for_each_int8_block(const MomentPlanes& planes, size_t begin, size_t end, const Run& run) {
  typename Int8Block<Vec>::Scratch scratch;
  for (size_t first = begin; first < end; first += kStateBlock) {
    const size_t last = end - first < kStateBlock ? end : first + kStateBlock;
    run(Int8Block<Vec>(planes, scratch, first, last));
  }
}

template <class Vec, class Grad>
[[gnu::flatten]] void adam_int8_range(const AdamCoefficients& coefficients, const NoiseKeys& noise_keys,
                                      const AdamPlanes& planes, size_t begin, size_t end) {
  const AdamCoefficients c = coefficients;
  const NoiseKeys keys = noise_keys;
  const SplitMaster<int8_t> master(planes);
  const auto* grad = static_cast<const Grad*>(planes.grad);
  with_usual(c, [&]<bool usual>() {
    for_each_int8_block<Vec>(planes.moments, begin, end, [=](const Int8Block<Vec>& block) {
      Largest<VecScalar> largest;
      const size_t tail = first_pass<usual, Vec>(c, master, block, grad, block.begin, largest);
      first_pass<usual, VecScalar>(c, master, block, grad, tail, largest);
      const CodesPerUnit per_unit = store_scales(block, largest);
      second_pass<Vec>(c, keys, master, block, per_unit, block.begin);
      second_pass<VecScalar>(c, keys, master, block, per_unit, tail);
      clear_codes_without_scale(block);
    });
  });
}

template <class Vec>
size_t encode_bf16_vectors(const float* exp_avg, const float* exp_avg_sq, const Bf16Moments moments,
                           size_t begin, size_t end) {
  size_t i = begin;
  for (; i + Vec::width <= end; i += Vec::width) {
    moments.store(i, Vec::load(exp_avg + i), Vec::load(exp_avg_sq + i), Vec::Bits::set(kHalfBf16));
  }
  return i;
}

template <class Vec>
[[gnu::flatten]] void encode_bf16_range(const float* exp_avg, const float* exp_avg_sq,
                                        const MomentPlanes& planes, size_t begin, size_t end) {
  const Bf16Moments moments(planes);
  const size_t rest = encode_bf16_vectors<Vec>(exp_avg, exp_avg_sq, moments, begin, end);
  encode_bf16_vectors<VecScalar>(exp_avg, exp_avg_sq, moments, rest, end);
}

template <class Vec, class Block>
size_t keep_vectors(const float* exp_avg, const float* exp_avg_sq, const Block block, size_t begin,
                    Largest<VecScalar>& total) {
  Largest<Vec> largest;
  size_t i = begin;
  for (; i + Vec::width <= block.end; i += Vec::width) {
    const Vec m = Vec::load(exp_avg + i);
    const Vec root = Vec::sqrt(Vec::load(exp_avg_sq + i));
    largest.see(m, root);
    block.keep(i, m, root);
  }
  total = largest.with(total);
  return i;
}

template <class Vec, class Block>
size_t code_vectors(const Block block, const CodesPerUnit per_unit, size_t begin) {
  size_t i = begin;
  for (; i + Vec::width <= block.end; i += Vec::width) {
    store_codes<Vec>(block, i, per_unit, Vec::Bits::set(kHalfCodes));
  }
  return i;
}

template <class Vec>
[[gnu::flatten]] void encode_int8_range(const float* exp_avg, const float* exp_avg_sq,
                                        const MomentPlanes& planes, size_t begin, size_t end) {
  for_each_int8_block<Vec>(planes, begin, end, [&](const Int8Block<Vec>& block) {
    Largest<VecScalar> largest;
    const size_t tail = keep_vectors<Vec>(exp_avg, exp_avg_sq, block, block.begin, largest);
    keep_vectors<VecScalar>(exp_avg, exp_avg_sq, block, tail, largest);
    const CodesPerUnit per_unit = store_scales(block, largest);
    code_vectors<Vec>(block, per_unit, block.begin);
    code_vectors<VecScalar>(block, per_unit, tail);
    clear_codes_without_scale(block);
  });
}

template <class Vec, class Moments>
size_t decode_vectors(const Moments moments, float* exp_avg, float* exp_avg_sq, size_t begin, size_t end) {
  size_t i = begin;
  for (; i + Vec::width <= end; i += Vec::width) {
    moments.template load_m<Vec>(i).store(exp_avg + i);
    moments.template load_v<Vec>(i).store(exp_avg_sq + i);
  }
  return i;
}

template <class Vec>
[[gnu::flatten]] void decode_bf16_range(const MomentPlanes& planes, float* exp_avg, float* exp_avg_sq,
                                        size_t begin, size_t end) {
  const Bf16Moments moments(planes);
  const size_t rest = decode_vectors<Vec>(moments, exp_avg, exp_avg_sq, begin, end);
  decode_vectors<VecScalar>(moments, exp_avg, exp_avg_sq, rest, end);
}

template <class Vec>
[[gnu::flatten]] void decode_int8_range(const MomentPlanes& planes, float* exp_avg, float* exp_avg_sq,
                                        size_t begin, size_t end) {
  for_each_int8_block<Vec>(planes, begin, end, [&](const Int8Block<Vec>& block) {
    const size_t tail = decode_vectors<Vec>(block, exp_avg, exp_avg_sq, block.begin, block.end);
    decode_vectors<VecScalar>(block, exp_avg, exp_avg_sq, tail, block.end);
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

template <class Words>
void assign_residual(int16_t* residual, Words fresh, Words weight) {
  Words::keep_where_equal(Words::load(residual), fresh, weight).store(residual);
}

template <class Words>
void assign_residual(int8_t* residual, Words fresh, Words weight) {
  Words::keep_where_equal(Words::widen(residual), fresh, weight).narrow(residual);
}

template <class Vec, class Residual>
size_t assign_vectors(Bf16* weight, Residual* residual, const Bf16* fresh, size_t begin, size_t end) {
  using Words = typename Vec::Words;
  size_t i = begin;
  for (; i + Vec::width <= end; i += Vec::width) {
    const Words assigned = Words::load(fresh + i);
    assign_residual(residual + i, assigned, Words::load(weight + i));
    assigned.store(weight + i);
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

// `Narrow` is the vector type for formats that are mostly of 16 and 8 bits.
template <class Vec, class Narrow>
constexpr KernelTable make_kernel_table() {
  return {
      .adam = {{&adam_range<Vec, SplitMaster<int16_t>, Fp32Moments, Bf16>,
                &adam_range<Vec, SplitMaster<int16_t>, Fp32Moments, Fp16>,
                &adam_range<Vec, SplitMaster<int16_t>, Fp32Moments, float>,
                &adam_range<Vec, Fp32Master, Fp32Moments, Fp16>,
                &adam_range<Vec, Fp32Master, Fp32Moments, float>},
               {&adam_range<Narrow, SplitMaster<int16_t>, Bf16Moments, Bf16>,
                &adam_range<Narrow, SplitMaster<int16_t>, Bf16Moments, Fp16>,
                &adam_range<Narrow, SplitMaster<int16_t>, Bf16Moments, float>,
                &adam_range<Vec, Fp32Master, Bf16Moments, Fp16>,
                &adam_range<Vec, Fp32Master, Bf16Moments, float>},
               {&adam_int8_range<Narrow, Bf16>, &adam_int8_range<Narrow, Fp16>,
                &adam_int8_range<Narrow, float>, nullptr, nullptr}},
      .encode_moments = {nullptr, &encode_bf16_range<Vec>, &encode_int8_range<Narrow>},
      .decode_moments = {nullptr, &decode_bf16_range<Vec>, &decode_int8_range<Narrow>},
      .square_sum_bf16 = &square_sum<Vec, Bf16>,
      .square_sum_fp16 = &square_sum<Vec, Fp16>,
      .square_sum_fp32 = &square_sum<Vec, float>,
      .master16 = master_kernels<Vec, int16_t>(),
      .master8 = master_kernels<Vec, int8_t>(),
  };
}

}  // namespace
}  // namespace offload::optim

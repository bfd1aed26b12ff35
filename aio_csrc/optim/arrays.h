// Norm and conversions of whole arrays, on the pool.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/blocks.h"
#include "optim/kernel_table.h"

namespace offload::optim {

inline double block_square_sum(const KernelTable& kernels, const Bf16* values, size_t count) {
  return kernels.square_sum_bf16(values, count);
}
inline double block_square_sum(const KernelTable& kernels, const Fp16* values, size_t count) {
  return kernels.square_sum_fp16(values, count);
}
inline double block_square_sum(const KernelTable& kernels, const float* values, size_t count) {
  return kernels.square_sum_fp32(values, count);
}

// sums[b] = the sum of squares of elements [b, b + 1) * kSquareBlock; the last block may be short.
template <class Element>
void block_square_sums(const KernelTable& kernels, const Element* values, size_t count, double* sums,
                       unsigned threads) {
  for_each_block(count, kBlockElements, threads, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; i += kSquareBlock) {
      sums[i / kSquareBlock] = block_square_sum(kernels, values + i, std::min(kSquareBlock, end - i));
    }
  });
}
static_assert(kBlockElements % kSquareBlock == 0, "a partial sum must not span two tasks");

// The conversions of `kernels` for the type of the residual.
inline const MasterKernels<int16_t>& master_kernels(const KernelTable& kernels, const int16_t*) {
  return kernels.master16;
}
inline const MasterKernels<int8_t>& master_kernels(const KernelTable& kernels, const int8_t*) {
  return kernels.master8;
}

template <class Residual>
void split_master(const KernelTable& kernels, const float* master, Bf16* weight, Residual* residual,
                  size_t count, unsigned threads) {
  for_each_block(count, kBlockElements, threads, [&](size_t begin, size_t end) {
    master_kernels(kernels, residual).split(master + begin, weight + begin, residual + begin, end - begin);
  });
}

template <class Residual>
void join_master(const KernelTable& kernels, const Bf16* weight, const Residual* residual, float* master,
                 size_t count, unsigned threads) {
  for_each_block(count, kBlockElements, threads, [&](size_t begin, size_t end) {
    master_kernels(kernels, residual).join(weight + begin, residual + begin, master + begin, end - begin);
  });
}

template <class Residual>
void assign_weight(const KernelTable& kernels, Bf16* weight, Residual* residual, const Bf16* fresh,
                   size_t count, unsigned threads) {
  for_each_block(count, kBlockElements, threads, [&](size_t begin, size_t end) {
    master_kernels(kernels, residual).assign(weight + begin, residual + begin, fresh + begin, end - begin);
  });
}

inline void encode_moments(const KernelTable& kernels, StateFormat format, const float* exp_avg,
                           const float* exp_avg_sq, const MomentPlanes& planes, size_t count,
                           unsigned threads) {
  for_each_block(count, kBlockElements, threads, [&](size_t begin, size_t end) {
    kernels.encode_moments[static_cast<size_t>(format)](exp_avg, exp_avg_sq, planes, begin, end);
  });
}

inline void decode_moments(const KernelTable& kernels, StateFormat format, const MomentPlanes& planes,
                           float* exp_avg, float* exp_avg_sq, size_t count, unsigned threads) {
  for_each_block(count, kBlockElements, threads, [&](size_t begin, size_t end) {
    kernels.decode_moments[static_cast<size_t>(format)](planes, exp_avg, exp_avg_sq, begin, end);
  });
}
static_assert(kBlockElements % kStateBlock == 0, "a block of moments must not span two tasks");

}  // namespace offload::optim

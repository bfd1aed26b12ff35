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

inline void split_master(const KernelTable& kernels, const float* master, Bf16* weight, int16_t* residual,
                         size_t count, unsigned threads) {
  for_each_block(count, kBlockElements, threads, [&](size_t begin, size_t end) {
    kernels.split_master(master + begin, weight + begin, residual + begin, end - begin);
  });
}

inline void join_master(const KernelTable& kernels, const Bf16* weight, const int16_t* residual,
                        float* master, size_t count, unsigned threads) {
  for_each_block(count, kBlockElements, threads, [&](size_t begin, size_t end) {
    kernels.join_master(weight + begin, residual + begin, master + begin, end - begin);
  });
}

inline void assign_weight(const KernelTable& kernels, Bf16* weight, int16_t* residual, const Bf16* fresh,
                          size_t count, unsigned threads) {
  for_each_block(count, kBlockElements, threads, [&](size_t begin, size_t end) {
    kernels.assign_weight(weight + begin, residual + begin, fresh + begin, end - begin);
  });
}

}  // namespace offload::optim

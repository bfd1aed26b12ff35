// Cuts flat arrays into blocks and spreads them over the pool.
#pragma once

#include <algorithm>
#include <cstddef>

#include "optim/fp_environment.h"
#include "util/thread_pool.h"

namespace offload::optim {

// Large enough that a thread streams through several pages of every plane, small enough that the last
// blocks of a chunk keep all threads busy.
inline constexpr size_t kBlockElements = 65536;

// Calls range(begin, end) for the parts of [0, count) between multiples of `block`.
template <class Range>
void for_each_block(size_t count, size_t block, unsigned threads, const Range& range) {
  const size_t blocks = count / block + (count % block != 0);
  ThreadPool::shared().run(blocks, threads, [&](size_t index) {
    const IeeeDefaults ieee_defaults;
    const size_t begin = index * block;
    range(begin, std::min(begin + block, count));
  });
}

}  // namespace offload::optim

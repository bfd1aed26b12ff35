// Same rounding on every thread.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace offload::optim {

// IEEE defaults in this scope: round to nearest, denormals neither flushed nor read as zero. A thread
// inherits these bits from the one that started it, and torch.set_flush_denormal() changes one thread only,
// so without this the result would depend on which thread took a block.
class IeeeDefaults {
 public:
#if defined(__x86_64__)
  IeeeDefaults() : before_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~IeeeDefaults() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kDefault = 0x1F80;  // all exceptions masked, nothing else set
  const unsigned before_;
#elif defined(__aarch64__)
  IeeeDefaults() : before_(__builtin_aarch64_get_fpcr()) { __builtin_aarch64_set_fpcr(0); }
  ~IeeeDefaults() { __builtin_aarch64_set_fpcr(before_); }

 private:
  const unsigned before_;
#else
  IeeeDefaults() {}
#endif

 public:
  IeeeDefaults(const IeeeDefaults&) = delete;
  IeeeDefaults& operator=(const IeeeDefaults&) = delete;
};

}  // namespace offload::optim

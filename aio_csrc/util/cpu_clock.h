#pragma once

#include <pthread.h>
#include <time.h>

namespace offload {

// CPU time that a thread of this process has used, the kernel's on its behalf included. It must not have been
// joined.
inline double cpu_seconds_of(pthread_t thread) noexcept {
  clockid_t clock;
  timespec used{};
  if (::pthread_getcpuclockid(thread, &clock) != 0 || ::clock_gettime(clock, &used) != 0) return 0;
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

}  // namespace offload

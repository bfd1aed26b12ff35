#pragma once

#include <pthread.h>
#include <signal.h>

namespace offload {

// Blocks signals while it lives. A thread started meanwhile inherits the mask for good, which gives two
// things: Ctrl-C is delivered to a thread of the host program (Python's main thread) and not to ours, and
// SIGXFSZ, sent to the thread whose write passes RLIMIT_FSIZE, stays pending, so that the write returns EFBIG
// instead of killing the process. Signals that report a fault of the thread itself stay open.
class SignalBlock {
 public:
  SignalBlock() noexcept {
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalBlock() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalBlock(const SignalBlock&) = delete;
  SignalBlock& operator=(const SignalBlock&) = delete;

 private:
  sigset_t before_;
};

}  // namespace offload

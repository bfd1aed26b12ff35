#include "io/uring_ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "io/error.h"

// Setup flags newer than the oldest kernel headers we build with; the values are the kernel's.
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

namespace offload {

namespace {

uint32_t load_acquire(uint32_t* shared) noexcept {
  return std::atomic_ref<uint32_t>(*shared).load(std::memory_order_acquire);
}

void store_release(uint32_t* shared, uint32_t value) noexcept {
  std::atomic_ref<uint32_t>(*shared).store(value, std::memory_order_release);
}

// How long the kernel's thread looks for entries before it sleeps: longer than the gap between two transfers
// of a busy queue, short beside a step.
constexpr uint32_t kSqpollIdleMs = 20;

int setup(uint32_t entries, uint32_t flags, io_uring_params& params) noexcept {
  std::memset(&params, 0, sizeof(params));
  params.flags = flags | IORING_SETUP_CLAMP;
  params.sq_thread_idle = (flags & IORING_SETUP_SQPOLL) != 0 ? kSqpollIdleMs : 0;
  return static_cast<int>(::syscall(__NR_io_uring_setup, entries, &params));
}

void* map_shared(int fd, size_t size, off_t offset) {
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);
  if (memory == MAP_FAILED) throw BackendError(errno, "mmap of io_uring");
  ::madvise(memory, size, MADV_DONTFORK);  // a forked child has no business in the rings of its parent
  return memory;
}

template <class T>
T* at(void* base, uint32_t offset) noexcept {
  return reinterpret_cast<T*>(static_cast<std::byte*>(base) + offset);
}

}  // namespace

UringRing::UringRing(uint32_t entries, bool sqpoll) {
  io_uring_params params;
  set_up(entries, sqpoll, params);
  try {
    require_operations();
    map(params);
    // A seccomp profile may allow the set-up and refuse the rest; better now than with transfers in flight.
    if (const int error = enter(0, 0)) throw BackendError(error, "io_uring_enter");
  } catch (...) {
    unmap();
    throw;
  }
}

// One issuer whose completions are worked off where it waits anyway (Linux 6.1): no interruptions of the
// thread, fewer wake-ups. Older kernels say EINVAL to flags they do not know and get plain rings.
void UringRing::set_up(uint32_t entries, bool sqpoll, io_uring_params& params) {
  if (sqpoll) {
    fd_ = UniqueFd(setup(entries, IORING_SETUP_SQPOLL, params));
    sqpoll_ = static_cast<bool>(fd_);
    if (sqpoll_) return;
    sqpoll_refused_ = errno;  // before Linux 5.11: EPERM for users
  }
  for (const uint32_t flags : {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, 0U}) {
    fd_ = UniqueFd(setup(entries, flags, params));
    if (fd_) return;
    if (errno != EINVAL) break;
  }
  throw BackendError(errno, "io_uring_setup");
}

UringRing::~UringRing() { unmap(); }

// Plain reads and writes came with Linux 5.6, one release after the single mapping that map() relies on.
void UringRing::require_operations() {
  // The header ends in a flexible array, so the room for it comes from the allocation; 8-byte words keep it
  // aligned.
  constexpr size_t kBytes = sizeof(io_uring_probe) + IORING_OP_LAST * sizeof(io_uring_probe_op);
  std::array<uint64_t, (kBytes + 7) / 8> memory{};
  auto* probe = reinterpret_cast<io_uring_probe*>(memory.data());
  if (const int error = register_with(IORING_REGISTER_PROBE, probe, IORING_OP_LAST)) {
    throw BackendError(error == EINVAL ? EOPNOTSUPP : error, "io_uring_register");
  }
  for (const int op : {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_FSYNC, IORING_OP_POLL_ADD}) {
    const bool known = op <= probe->last_op;
    if (!known || (probe->ops[op].flags & IO_URING_OP_SUPPORTED) == 0) {
      throw BackendError(EOPNOTSUPP, "io_uring_register");
    }
  }
}

void UringRing::map(const io_uring_params& params) {
  if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0) throw BackendError(EOPNOTSUPP, "io_uring_setup");
  const size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
  const size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  ring_bytes_ = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
  ring_memory_ = map_shared(fd_.get(), ring_bytes_, IORING_OFF_SQ_RING);
  sqes_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  sqes_ = static_cast<io_uring_sqe*>(map_shared(fd_.get(), sqes_bytes_, IORING_OFF_SQES));

  sq_head_ = at<uint32_t>(ring_memory_, params.sq_off.head);
  sq_tail_ = at<uint32_t>(ring_memory_, params.sq_off.tail);
  sq_flags_ = at<uint32_t>(ring_memory_, params.sq_off.flags);
  sq_mask_ = *at<uint32_t>(ring_memory_, params.sq_off.ring_mask);
  sq_entries_ = params.sq_entries;
  cq_head_ = at<uint32_t>(ring_memory_, params.cq_off.head);
  cq_tail_ = at<uint32_t>(ring_memory_, params.cq_off.tail);
  cq_mask_ = *at<uint32_t>(ring_memory_, params.cq_off.ring_mask);
  cqes_ = at<io_uring_cqe>(ring_memory_, params.cq_off.cqes);
  sq_tail_local_ = *sq_tail_;

  // Entry i of the index array always names submission entry i: we use them in ring order.
  uint32_t* array = at<uint32_t>(ring_memory_, params.sq_off.array);
  for (uint32_t i = 0; i < params.sq_entries; ++i) array[i] = i;
}

void UringRing::unmap() noexcept {
  if (sqes_ != nullptr) ::munmap(sqes_, sqes_bytes_);
  if (ring_memory_ != nullptr) ::munmap(ring_memory_, ring_bytes_);
  sqes_ = nullptr;
  ring_memory_ = nullptr;
}

io_uring_sqe* UringRing::next_sqe() noexcept {
  if (sq_tail_local_ - load_acquire(sq_head_) == sq_entries_) return nullptr;
  io_uring_sqe* sqe = &sqes_[sq_tail_local_ & sq_mask_];
  std::memset(sqe, 0, sizeof(*sqe));
  ++sq_tail_local_;
  ++unsubmitted_;
  return sqe;
}

int UringRing::enter(uint32_t count_submit, uint32_t count_min) noexcept {
  store_release(sq_tail_, sq_tail_local_);  // the entries' contents before the tail that announces them
  uint32_t flags = IORING_ENTER_GETEVENTS;
  if (sqpoll_) {
    unsubmitted_ = 0;  // the kernel's thread takes them, if it is awake: our tail before its flag
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if ((load_acquire(sq_flags_) & IORING_SQ_NEED_WAKEUP) != 0) flags |= IORING_ENTER_SQ_WAKEUP;
  }
  // GETEVENTS even where nothing is waited for: with DEFER_TASKRUN it is what moves completions into the
  // ring.
  const long rc =
      ::syscall(__NR_io_uring_enter, fd_.get(), count_submit, count_min, flags, nullptr, size_t{0});
  if (rc < 0) return errno;
  if (!sqpoll_) unsubmitted_ -= static_cast<uint32_t>(rc);
  return 0;
}

int UringRing::register_with(uint32_t opcode, const void* argument, uint32_t count) noexcept {
  const long rc = ::syscall(__NR_io_uring_register, fd_.get(), opcode, argument, count);
  return rc < 0 ? errno : 0;
}

bool UringRing::pop(io_uring_cqe& out) noexcept {
  const uint32_t head = *cq_head_;  // only we write it
  if (head == load_acquire(cq_tail_)) return false;
  out = cqes_[head & cq_mask_];
  store_release(cq_head_, head + 1);  // our copy before the kernel may use the place again
  return true;
}

}  // namespace offload

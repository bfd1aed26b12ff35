#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/backends.h"
#include "io/faulty_backend.h"
#include "io/file.h"
#include "io/schedule.h"
#include "io/stats.h"

namespace offload {

struct QueueOptions {
  FileOptions file;
  std::string backend;
  BackendOptions backend_options;
  uint64_t request_bytes = uint64_t{1}
                           << 20;   // size of one request at most; a multiple of the file's alignment
  uint64_t bytes_pending_max = 0;   // accepted and not done, at most; 0: no limit
  std::optional<FaultPlan> faults;  // tests only
};

enum class Added : uint8_t { kYes, kNoRoom, kClosed };

// The thread of one queue, and all that it works on: file, backend, schedule, slots. Apart from IoQueue so
// that a forked child can leave it untouched as a whole.
class Worker {
 public:
  explicit Worker(const QueueOptions& options);  // opens the file; throws IoError, std::invalid_argument
  void start();                                  // throws BackendError

  // Accepts a transfer once there is room for its bytes, for which it waits no longer than `limit`; it keeps
  // its place in the line for the next try, or leaves it. The highest priority is first in line, and within
  // it who came first. A transfer larger than all the room is accepted alone.
  [[nodiscard]] Added add_within(std::chrono::nanoseconds limit, const std::shared_ptr<Transfer>& transfer);
  void leave_line(const Transfer& transfer) noexcept;

  // Ends with ECANCELED what is not in flight of the transfer; nothing happens where all is, or it is done.
  void cancel(std::shared_ptr<const Ticket> ticket);
  void request_stop(bool cancel) noexcept;

  // See IoBackend::add_region; EBADF where the worker is stopping.
  [[nodiscard]] int add_region(std::span<std::byte> region) { return change_region(region, true); }
  [[nodiscard]] int remove_region(std::span<std::byte> region) { return change_region(region, false); }

  [[nodiscard]] bool join_for(std::chrono::nanoseconds limit);

  [[nodiscard]] IoFile& file() noexcept { return file_; }
  [[nodiscard]] const IoStats& stats() const noexcept { return stats_; }
  [[nodiscard]] const IoCapabilities& capabilities() const noexcept { return capabilities_; }
  [[nodiscard]] size_t queue_depth() const noexcept { return slots_.size(); }
  [[nodiscard]] double cpu_seconds() noexcept;  // of the thread, and of those of the backend

 private:
  // Memory to be registered, or not any more, by the thread: the kernel wants it to be the one that submits.
  struct RegionChange {
    std::span<std::byte> region;
    bool add;
    std::promise<int> error;
  };
  enum class Next : uint8_t { kReap, kLookAgain, kStop };

  using Place = std::pair<IoPriority, uint64_t>;

  [[nodiscard]] bool may_enter(const Place& place, uint64_t bytes) const noexcept;
  void wake_thread() noexcept;
  void cancel_all();
  [[nodiscard]] int change_region(std::span<std::byte> region, bool add);
  void make_backend_and_slots();
  void run();
  void take_inbox();
  void submit();
  [[nodiscard]] Next decide();
  [[nodiscard]] IoRequest request_of(const Piece& piece, uint64_t token) noexcept;

  void complete(const IoCompletion& completion);
  void refused(Piece piece, int error);
  void advanced(Piece piece, uint64_t bytes);
  void end_piece(const Piece& piece, int error);
  void end_if_over(Transfer& transfer);

  const QueueOptions options_;
  IoFile file_;
  IoStats stats_;
  std::thread thread_;

  // Of the thread alone, from start() on.
  std::unique_ptr<IoBackend> backend_;
  IoCapabilities capabilities_{};
  Schedule schedule_;
  std::vector<Piece> slots_;  // by token
  std::vector<uint32_t> slots_free_;
  std::vector<IoRequest> requests_;
  std::vector<IoCompletion> completions_;
  uint64_t tickets_finished_ = 0;
  bool stop_seen_ = false;
  bool cancel_seen_ = false;

  std::mutex mutex_;  // guards all below
  std::vector<std::shared_ptr<Transfer>> inbox_;
  std::vector<RegionChange> region_changes_;
  std::vector<std::shared_ptr<const Ticket>> cancels_;
  uint64_t transfers_added_ = 0;
  bool reaping_ = false;    // the thread is in a reap, or about to be
  bool has_slots_ = false;  // new work must end it
  uint64_t bytes_pending_ = 0;
  uint64_t places_given_ = 0;
  std::set<Place> line_;  // those who wait for room
  std::condition_variable room_;
  bool stopping_ = false;
  bool cancelling_ = false;
  bool exited_ = false;
  double cpu_seconds_ = 0;  // once it has exited
  std::condition_variable exit_;
};

}  // namespace offload

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
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
  std::optional<FaultPlan> faults;  // tests only
};

// The thread of one queue, and all that it works on: file, backend, schedule, slots. Apart from IoQueue so
// that a forked child can leave it untouched as a whole.
class Worker {
 public:
  explicit Worker(const QueueOptions& options);  // opens the file; throws IoError, std::invalid_argument
  void start();                                  // throws BackendError

  // False where the worker is stopping.
  [[nodiscard]] bool add(std::shared_ptr<Transfer> transfer);
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
  uint64_t transfers_added_ = 0;
  bool sleeping_ = false;  // the thread is in a reap that new work must end
  bool stopping_ = false;
  bool cancelling_ = false;
  bool exited_ = false;
  double cpu_seconds_ = 0;  // once it has exited
  std::condition_variable exit_;
};

}  // namespace offload

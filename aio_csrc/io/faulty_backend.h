#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "io/backend.h"

namespace offload {

// What shall go wrong. 0 switches a fault off. Reads and writes are "data operations", counted from 1 in the
// order of submission.
struct FaultPlan {
  uint64_t seed = 0;
  uint64_t short_one_in = 0;   // results cut short; what was not read is overwritten with junk
  uint64_t eintr_one_in = 0;   // refused with EINTR, not carried out
  uint64_t eagain_one_in = 0;  // refused with EAGAIN, not carried out
  uint64_t fail_at = 0;        // this data operation fails with fail_errno, not carried out
  uint64_t fail_errno = 5;
  uint64_t fail_count = 1;     // and so many from there on
  uint64_t sync_errno = 0;     // every sync fails so
  uint64_t delay_at = 0;       // this data operation completes late; see delay_ms
  uint64_t delay_ms = 0;       // with delay_at 0 every operation does
  uint64_t reorder = 0;        // 1: completions are handed out in random order
  uint64_t refuse_direct = 0;  // 1: transfers through an O_DIRECT descriptor fail with EINVAL
  uint64_t tear_at = 0;        // this data operation, if a write, stores a part and fails with fail_errno
  uint64_t tear_one_in = 0;
  uint64_t tear_silently_at = 0;  // this one, if a write, stores a part and says that it stored all
  uint64_t tear_silently_one_in = 0;
  uint64_t lose_at = 0;  // this data operation is carried out and never reported
  uint64_t lose_one_in = 0;
  uint64_t submit_one = 0;        // 1: submit takes one request at a time
  uint64_t bytes_per_second = 0;  // completions are handed out no faster than this
};

// Test double: any backend, made worse. Same seed, same faults: what happens to a transfer depends on the
// seed, its place in the file and how often that place was tried, not on time or on the order of events.
class FaultyBackend final : public IoBackend {
 public:
  FaultyBackend(std::unique_ptr<IoBackend> inner, const FaultPlan& plan);
  ~FaultyBackend() override;

  [[nodiscard]] size_t submit(std::span<const IoRequest> requests) override;
  [[nodiscard]] size_t reap(std::span<IoCompletion> out, size_t count_min) override;
  void wake() noexcept override { inner_->wake(); }
  [[nodiscard]] IoCapabilities capabilities() const noexcept override { return inner_->capabilities(); }
  void use_files(std::span<const int> fds) override { inner_->use_files(fds); }
  [[nodiscard]] int add_region(std::span<std::byte> region) override { return inner_->add_region(region); }
  void remove_region(std::span<std::byte> region) override { inner_->remove_region(region); }
  [[nodiscard]] double cpu_seconds() const noexcept override { return inner_->cpu_seconds(); }

 private:
  // A transfer that the inner backend carries out in part. Its result is cut to `result`, or replaced by it.
  struct Altered {
    IoRequest request;
    int64_t result;
    bool torn;
  };

  [[nodiscard]] std::optional<int64_t> refusal(const IoRequest& request, uint64_t luck);
  [[nodiscard]] std::optional<Altered> shortened(const IoRequest& request, uint64_t luck) const;
  [[nodiscard]] std::optional<Altered> torn(const IoRequest& request, uint64_t luck) const;
  void start(const IoRequest& request, const std::optional<Altered>& altered);
  void alter(IoCompletion& completion);
  [[nodiscard]] uint64_t draw(const IoRequest& request);
  void pull(size_t count_min);
  void keep_to_rate(int64_t result);

  std::unique_ptr<IoBackend> inner_;
  const FaultPlan plan_;
  uint64_t data_operations_ = 0;
  uint64_t reorder_state_;
  size_t inner_in_flight_ = 0;
  std::map<std::tuple<IoOp, uint64_t>, uint64_t> tries_;  // by place in the file
  std::unordered_map<uint64_t, Altered> altered_;         // by token
  std::unordered_set<uint64_t> delayed_;                  // by token
  std::unordered_set<uint64_t> lost_;                     // by token
  std::deque<IoCompletion> held_;
  std::chrono::steady_clock::time_point rate_next_{};  // when the next completion may be handed out
};

}  // namespace offload

#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "io/ticket.h"

namespace offload {

enum class IoPriority : uint8_t { kNeeded, kPrefetch, kWriteBack };
inline constexpr size_t kIoPriorityCount = 3;

// One ticket's work. Owned by the queue's thread once it is in the schedule.
struct Transfer {
  std::shared_ptr<Ticket> ticket;
  std::byte* buffer;
  IoPriority priority;
  uint64_t number = 0;        // order of submission within the queue
  uint64_t place = 0;         // in the line for room, if it had to wait there
  uint64_t bytes_cut = 0;     // handed out as pieces so far
  uint64_t bytes_done = 0;    // of pieces that have ended
  uint32_t pieces_open = 0;   // handed out, not ended
  uint32_t writes_ahead = 0;  // kSync: writes submitted earlier that have not ended
  int error = 0;              // the first one
};

// A part of a transfer that fits one request of the backend.
struct Piece {
  std::shared_ptr<Transfer> transfer;
  uint64_t begin = 0;  // within the transfer
  uint64_t size = 0;
  uint64_t done = 0;
  bool direct = false;    // through the O_DIRECT descriptor
  uint32_t refusals = 0;  // attempts in a row that moved no byte
};

// How transfers are cut. See Note [Unaligned transfers] in file.h.
struct CutRules {
  uint64_t request_bytes;
  uint64_t alignment;
  uint64_t memory_alignment;
  bool direct;
};

// Says which piece goes next: the highest priority, and within it the order of submission. Knows no thread,
// no descriptor and no clock.
//
// A sync waits until all writes submitted before it have ended, and for nothing else; it then goes first.
class Schedule {
 public:
  void add(std::shared_ptr<Transfer> transfer);

  // Cuts or takes up the next piece; nothing where all that is left waits for pieces in flight.
  [[nodiscard]] std::optional<Piece> next(const CutRules& rules);

  // A piece that has not ended: refused, short, or not taken by the backend. It goes before new pieces.
  void put_back(Piece piece);

  // Gives up what is not in flight of a transfer that has failed.
  void drop(Transfer& transfer);

  // What is not in flight of this ticket's transfer; nullptr where all is, or nothing is left.
  [[nodiscard]] std::shared_ptr<Transfer> find(const Ticket& ticket) const;

  // A transfer has ended; syncs that waited for it may go.
  void ended(const Transfer& transfer);

  // Removes and returns all transfers, for cancelling. Those with pieces in flight are among them.
  [[nodiscard]] std::vector<std::shared_ptr<Transfer>> drop_all();

  [[nodiscard]] bool empty() const noexcept;

 private:
  struct Level {
    std::deque<Piece> resumed;
    std::deque<std::shared_ptr<Transfer>> waiting;  // not entirely cut yet
  };

  std::array<Level, kIoPriorityCount> levels_;
  std::deque<std::shared_ptr<Transfer>> syncs_;
  std::deque<uint64_t> writes_open_;  // numbers of writes that have not ended, ascending
};

[[nodiscard]] Piece cut(const std::shared_ptr<Transfer>& transfer, const CutRules& rules);

}  // namespace offload

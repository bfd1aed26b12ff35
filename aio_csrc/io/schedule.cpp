#include "io/schedule.h"

#include <algorithm>

namespace offload {

void Schedule::add(std::shared_ptr<Transfer> transfer) {
  switch (transfer->ticket->op()) {
    case IoOp::kSync:
      transfer->writes_ahead = static_cast<uint32_t>(writes_open_.size());
      syncs_.push_back(std::move(transfer));
      return;
    case IoOp::kWrite:
      writes_open_.push_back(transfer->number);
      break;
    case IoOp::kRead:
      break;
  }
  Level& level = levels_[static_cast<size_t>(transfer->priority)];
  level.waiting.push_back(std::move(transfer));
}

Piece cut(const std::shared_ptr<Transfer>& transfer, const CutRules& rules) {
  const uint64_t begin = transfer->bytes_cut;
  const uint64_t left = transfer->ticket->size() - begin;
  const uint64_t past_boundary = (transfer->ticket->offset() + begin) % rules.alignment;
  const auto address = reinterpret_cast<uintptr_t>(transfer->buffer + begin);
  Piece piece{.transfer = transfer, .begin = begin};
  if (!rules.direct) {
    piece.size = std::min(left, rules.request_bytes);
  } else if (past_boundary != 0) {  // the head, up to the next boundary
    piece.size = std::min(left, rules.alignment - past_boundary);
  } else if (left < rules.alignment) {  // the tail
    piece.size = left;
  } else {
    piece.size = std::min(left - left % rules.alignment, rules.request_bytes);
    piece.direct = address % rules.memory_alignment == 0;
  }
  transfer->bytes_cut += piece.size;
  ++transfer->pieces_open;
  return piece;
}

std::optional<Piece> Schedule::next(const CutRules& rules) {
  if (!syncs_.empty() && syncs_.front()->writes_ahead == 0) {
    Piece piece{.transfer = std::move(syncs_.front())};
    ++piece.transfer->pieces_open;
    syncs_.pop_front();
    return piece;
  }
  for (Level& level : levels_) {
    if (!level.resumed.empty()) {
      Piece piece = std::move(level.resumed.front());
      level.resumed.pop_front();
      return piece;
    }
    if (!level.waiting.empty()) {
      Piece piece = cut(level.waiting.front(), rules);
      if (piece.transfer->bytes_cut == piece.transfer->ticket->size()) level.waiting.pop_front();
      return piece;
    }
  }
  return std::nullopt;
}

void Schedule::put_back(Piece piece) {
  Level& level = levels_[static_cast<size_t>(piece.transfer->priority)];
  level.resumed.push_front(std::move(piece));
}

void Schedule::drop(Transfer& transfer) {
  Level& level = levels_[static_cast<size_t>(transfer.priority)];
  std::erase_if(level.resumed, [&](const Piece& piece) {
    if (piece.transfer.get() != &transfer) return false;
    transfer.bytes_done += piece.done;
    --transfer.pieces_open;
    return true;
  });
  const auto is_it = [&](const auto& waiting) { return waiting.get() == &transfer; };
  std::erase_if(level.waiting, is_it);
  std::erase_if(syncs_, is_it);
}

std::shared_ptr<Transfer> Schedule::find(const Ticket& ticket) const {
  const auto is_it = [&](const std::shared_ptr<Transfer>& transfer) {
    return transfer->ticket.get() == &ticket;
  };
  if (const auto found = std::find_if(syncs_.begin(), syncs_.end(), is_it); found != syncs_.end())
    return *found;
  for (const Level& level : levels_) {
    for (const Piece& piece : level.resumed) {
      if (is_it(piece.transfer)) return piece.transfer;
    }
    const auto found = std::find_if(level.waiting.begin(), level.waiting.end(), is_it);
    if (found != level.waiting.end()) return *found;
  }
  return nullptr;
}

void Schedule::ended(const Transfer& transfer) {
  if (transfer.ticket->op() != IoOp::kWrite) return;
  writes_open_.erase(std::lower_bound(writes_open_.begin(), writes_open_.end(), transfer.number));
  for (const auto& sync : syncs_) {
    if (sync->number > transfer.number) --sync->writes_ahead;
  }
}

std::vector<std::shared_ptr<Transfer>> Schedule::drop_all() {
  std::vector<std::shared_ptr<Transfer>> dropped(syncs_.begin(), syncs_.end());
  syncs_.clear();
  for (Level& level : levels_) {
    for (const Piece& piece : level.resumed) dropped.push_back(piece.transfer);
    dropped.insert(dropped.end(), level.waiting.begin(), level.waiting.end());
  }
  // A transfer may have several pieces to resume, and an uncut rest.
  std::sort(dropped.begin(), dropped.end());
  dropped.erase(std::unique(dropped.begin(), dropped.end()), dropped.end());
  for (const auto& transfer : dropped) drop(*transfer);
  return dropped;
}

bool Schedule::empty() const noexcept {
  return syncs_.empty() && std::all_of(levels_.begin(), levels_.end(), [](const Level& level) {
           return level.resumed.empty() && level.waiting.empty();
         });
}

}  // namespace offload

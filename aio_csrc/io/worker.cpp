#include "io/worker.h"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "io/error.h"
#include "util/cpu_clock.h"
#include "util/signal_block.h"

namespace offload {

namespace {

// A transfer that is refused so often in a row without moving a byte will not pass.
constexpr uint32_t kRefusalsMax = 20;
constexpr uint32_t kRefusalsAtOnce = 4;  // before the first pause
constexpr uint32_t kPauseMsMax = 64;

// The kernel is short of something. The whole queue pauses: more requests would not help it.
void pause_after(uint32_t refusals) {
  if (refusals <= kRefusalsAtOnce) return;
  const uint32_t doublings = std::min<uint32_t>(refusals - kRefusalsAtOnce - 1, 6);
  std::this_thread::sleep_for(std::chrono::milliseconds(std::min(1U << doublings, kPauseMsMax)));
}

}  // namespace

Worker::Worker(const QueueOptions& options) : options_(options), file_(options.file) {
  if (options.request_bytes == 0 || options.request_bytes % file_.alignment() != 0) {
    throw std::invalid_argument("request_bytes must be a multiple of " + std::to_string(file_.alignment()) +
                                ", the alignment of " + options.file.path + "; got " +
                                std::to_string(options.request_bytes));
  }
}

// The backend is made by the thread that will use it (io_uring holds us to that); its errors come out here.
void Worker::start() {
  std::promise<void> made;
  std::future<void> result = made.get_future();
  try {
    const SignalBlock block;
    thread_ = std::thread([this, made = std::move(made)]() mutable {
      try {
        make_backend_and_slots();
      } catch (...) {
        made.set_exception(std::current_exception());
        return;
      }
      made.set_value();
      run();
    });
  } catch (const std::system_error& refused) {
    throw BackendError(refused.code().value(), "pthread_create");
  }
  try {
    result.get();
  } catch (...) {
    thread_.join();
    throw;
  }
}

void Worker::make_backend_and_slots() {
  backend_ = make_backend(options_.backend, options_.backend_options);
  if (options_.faults) backend_ = std::make_unique<FaultyBackend>(std::move(backend_), *options_.faults);
  capabilities_ = backend_->capabilities();
  const size_t depth = std::clamp<size_t>(options_.backend_options.depth, 1, capabilities_.depth_max);
  std::vector<int> fds = {file_.fd(false)};
  if (file_.direct()) fds.push_back(file_.fd(true));
  backend_->use_files(fds);
  slots_.resize(depth);
  stats_.set_depth(depth);
  completions_.resize(depth);
  requests_.reserve(depth);
  for (size_t i = depth; i-- > 0;) slots_free_.push_back(static_cast<uint32_t>(i));
}

Added Worker::add_within(std::chrono::nanoseconds limit, const std::shared_ptr<Transfer>& transfer) {
  const uint64_t bytes = transfer->ticket->size();
  std::unique_lock lock(mutex_);
  if (options_.bytes_pending_max != 0) {
    if (transfer->place == 0) transfer->place = ++places_given_;
    const Place place = {transfer->priority, transfer->place};
    line_.insert(place);
    if (!room_.wait_for(lock, limit, [&] { return stopping_ || may_enter(place, bytes); }))
      return Added::kNoRoom;
    line_.erase(place);
    if (!line_.empty()) room_.notify_all();  // there may be room for the next one, too
  }
  if (stopping_) return Added::kClosed;
  bytes_pending_ += bytes;
  transfer->number = ++transfers_added_;
  inbox_.push_back(transfer);
  if (has_slots_) wake_thread();
  return Added::kYes;
}

bool Worker::may_enter(const Place& place, uint64_t bytes) const noexcept {
  return *line_.begin() == place &&
         (bytes_pending_ == 0 || bytes_pending_ + bytes <= options_.bytes_pending_max);
}

void Worker::leave_line(const Transfer& transfer) noexcept {
  const std::lock_guard lock(mutex_);
  line_.erase({transfer.priority, transfer.place});
  room_.notify_all();
}

void Worker::cancel(std::shared_ptr<const Ticket> ticket) {
  const std::lock_guard lock(mutex_);
  if (exited_) return;
  cancels_.push_back(std::move(ticket));
  wake_thread();
}

// Under the lock. One wake is enough.
void Worker::wake_thread() noexcept {
  if (reaping_) backend_->wake();
  reaping_ = false;
  has_slots_ = false;
}

void Worker::request_stop(bool cancel) noexcept {
  const std::lock_guard lock(mutex_);
  if (exited_) return;
  stopping_ = true;
  cancelling_ |= cancel;
  wake_thread();
  room_.notify_all();
}

int Worker::change_region(std::span<std::byte> region, bool add) {
  std::future<int> error;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return EBADF;
    error = region_changes_.emplace_back(RegionChange{region, add, {}}).error.get_future();
    wake_thread();
  }
  return error.get();
}

bool Worker::join_for(std::chrono::nanoseconds limit) {
  std::unique_lock lock(mutex_);
  if (!exit_.wait_for(lock, limit, [&] { return exited_; })) return false;
  if (thread_.joinable()) thread_.join();  // it has let go of the mutex for good
  return true;
}

// An error of the backend itself (not of a transfer) is a mistake in this code, and it is then unknown which
// buffers the kernel still writes to. It leaves this function as an exception, which ends the process.
void Worker::run() {
  for (;;) {
    take_inbox();
    submit();
    const Next next = decide();
    if (next == Next::kStop) break;
    if (next == Next::kLookAgain) continue;
    const size_t count = backend_->reap(completions_, 1);
    for (size_t i = 0; i < count; ++i) complete(completions_[i]);
  }
  file_.forget_all_cached();
  const std::lock_guard lock(mutex_);
  cpu_seconds_ = cpu_seconds_of(::pthread_self()) + backend_->cpu_seconds();
  backend_.reset();
  exited_ = true;
  exit_.notify_all();
}

double Worker::cpu_seconds() noexcept {
  const std::lock_guard lock(mutex_);  // until exited_ is set under it, the thread and its backend are there
  return exited_ ? cpu_seconds_ : cpu_seconds_of(thread_.native_handle()) + backend_->cpu_seconds();
}

void Worker::take_inbox() {
  std::vector<std::shared_ptr<Transfer>> arrived;
  std::vector<RegionChange> changes;
  std::vector<std::shared_ptr<const Ticket>> cancels;
  {
    const std::lock_guard lock(mutex_);
    reaping_ = false;
    has_slots_ = false;
    cancels.swap(cancels_);
    arrived.swap(inbox_);
    changes.swap(region_changes_);
    stop_seen_ = stopping_;
    cancel_seen_ = cancelling_;
  }
  for (RegionChange& change : changes) {
    if (!change.add) backend_->remove_region(change.region);
    change.error.set_value(change.add ? backend_->add_region(change.region) : 0);
  }
  for (auto& transfer : arrived) {
    const bool empty = transfer->ticket->op() != IoOp::kSync && transfer->ticket->size() == 0;
    if (empty) {
      transfer->ticket->finish(0, 0, ++tickets_finished_);
    } else {
      schedule_.add(std::move(transfer));
    }
  }
  for (const auto& ticket : cancels) {
    const auto transfer = schedule_.find(*ticket);
    if (transfer == nullptr || transfer->error != 0) continue;
    transfer->error = ECANCELED;
    schedule_.drop(*transfer);
    end_if_over(*transfer);
  }
  if (cancel_seen_) cancel_all();
}

void Worker::cancel_all() {
  for (const auto& transfer : schedule_.drop_all()) {
    if (transfer->error == 0) transfer->error = ECANCELED;
    end_if_over(*transfer);
  }
}

void Worker::submit() {
  const CutRules rules = {.request_bytes = options_.request_bytes,
                          .alignment = file_.alignment(),
                          .memory_alignment = file_.memory_alignment(),
                          .direct = file_.direct()};
  requests_.clear();
  while (!slots_free_.empty()) {
    std::optional<Piece> piece = schedule_.next(rules);
    if (!piece) break;
    const uint32_t token = slots_free_.back();
    slots_free_.pop_back();
    requests_.push_back(request_of(*piece, token));
    slots_[token] = std::move(*piece);
  }
  if (requests_.empty()) return;
  const size_t taken = backend_->submit(requests_);
  const auto now = IoStats::Clock::now();
  for (size_t i = 0; i < taken; ++i) stats_.begin(requests_[i], now);
  for (size_t i = requests_.size(); i-- > taken;) {  // last first, to keep their order
    const auto token = static_cast<uint32_t>(requests_[i].token);
    schedule_.put_back(std::move(slots_[token]));
    slots_free_.push_back(token);
  }
}

IoRequest Worker::request_of(const Piece& piece, uint64_t token) noexcept {
  const Ticket& ticket = *piece.transfer->ticket;
  if (ticket.op() == IoOp::kSync) return {IoOp::kSync, file_.fd(false), nullptr, 0, 0, token};
  const uint64_t at = piece.begin + piece.done;
  return {ticket.op(),
          file_.fd(piece.direct),
          piece.transfer->buffer + at,
          piece.size - piece.done,
          ticket.offset() + at,
          token};
}

// Under the lock that those who bring work take: what arrives later finds `reaping_` and wakes the backend.
Worker::Next Worker::decide() {
  const size_t in_flight = slots_.size() - slots_free_.size();
  const std::lock_guard lock(mutex_);
  if (!inbox_.empty() || !region_changes_.empty() || !cancels_.empty() || stopping_ != stop_seen_ ||
      cancelling_ != cancel_seen_)
    return Next::kLookAgain;
  if (stop_seen_ && in_flight == 0 && schedule_.empty()) return Next::kStop;
  reaping_ = true;
  has_slots_ = !slots_free_.empty();  // with all slots taken, new work has to wait for a completion anyway
  return Next::kReap;
}

void Worker::complete(const IoCompletion& completion) {
  Piece piece = std::move(slots_.at(completion.token));
  slots_free_.push_back(static_cast<uint32_t>(completion.token));
  const Ticket& ticket = *piece.transfer->ticket;
  const bool is_sync = ticket.op() == IoOp::kSync;
  const bool buffered = !is_sync && !piece.direct;
  stats_.end(completion.token, IoStats::Clock::now(), buffered);
  if (completion.result < 0) return refused(std::move(piece), static_cast<int>(-completion.result));
  const auto bytes = static_cast<uint64_t>(completion.result);
  if (buffered) {
    file_.forget_cached(ticket.offset() + piece.begin + piece.done, bytes, ticket.op() == IoOp::kWrite);
  }
  if (!is_sync) return advanced(std::move(piece), bytes);
  file_.forget_all_cached();  // all clean now
  end_piece(piece, 0);
}

// The backend has moved nothing.
void Worker::refused(Piece piece, int error) {
  const IoOp op = piece.transfer->ticket->op();
  const bool given_up = piece.transfer->error != 0;
  if ((error == EINTR || error == EAGAIN) && !given_up && piece.refusals < kRefusalsMax) {
    stats_.retried(op);
    pause_after(++piece.refusals);
    schedule_.put_back(std::move(piece));
  } else if (error == EINVAL && piece.direct && !given_up && file_.give_up_direct(error)) {
    piece.direct = false;
    schedule_.put_back(std::move(piece));
  } else {
    end_piece(piece, error);
  }
}

void Worker::advanced(Piece piece, uint64_t bytes) {
  const IoOp op = piece.transfer->ticket->op();
  if (bytes > piece.size - piece.done)
    throw std::logic_error("the kernel transferred more than was asked for");
  if (bytes == 0) {
    if (op == IoOp::kRead) return end_piece(piece, ENODATA);  // the file ends here
    return piece.refusals < kRefusalsMax ? refused(std::move(piece), EAGAIN) : end_piece(piece, EIO);
  }
  const uint64_t before = piece.done;
  piece.done += bytes;
  piece.refusals = 0;
  const bool ended = piece.done == piece.size || piece.transfer->error != 0;
  if (!ended && piece.direct) {
    // O_DIRECT goes on from a boundary: the bytes past the last one are transferred again. Where that would
    // be no progress (a file that ends within a block), the rest goes buffered, which can stop anywhere.
    const uint64_t boundary = piece.done - piece.done % file_.alignment();
    piece.direct = boundary > before;
    if (piece.direct) piece.done = boundary;
  }
  stats_.moved(op, piece.done - before);
  if (ended) return end_piece(piece, 0);
  stats_.resumed(op);
  schedule_.put_back(std::move(piece));
}

void Worker::end_piece(const Piece& piece, int error) {
  Transfer& transfer = *piece.transfer;
  transfer.bytes_done += piece.done;
  --transfer.pieces_open;
  if (error != 0 && transfer.error == 0) {
    transfer.error = error;
    schedule_.drop(transfer);
  }
  end_if_over(transfer);
}

void Worker::end_if_over(Transfer& transfer) {
  const bool more_to_come = transfer.error == 0 && transfer.bytes_cut < transfer.ticket->size();
  if (transfer.pieces_open > 0 || more_to_come) return;
  schedule_.ended(transfer);
  if (transfer.error != 0) stats_.failed(transfer.ticket->op());
  transfer.ticket->finish(transfer.error, transfer.bytes_done, ++tickets_finished_);
  const std::lock_guard lock(mutex_);
  bytes_pending_ -= transfer.ticket->size();
  if (!line_.empty()) room_.notify_all();
}

}  // namespace offload

// The boundary of the I/O core with Python. It parses arguments, lets go of the GIL where it waits, and keeps
// buffers alive for as long as the kernel may touch them. Texts and hints are made in offload/aio.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <exception>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "aio_buffer.h"
#include "aio_faults.h"
#include "io/backends.h"
#include "io/error.h"
#include "io/queue.h"

namespace py = pybind11;

namespace {

using offload::Added;
using offload::Buffer;
using offload::IoOp;
using offload::IoPriority;
using offload::IoQueue;

using Clock = std::chrono::steady_clock;

// Between two looks at pending signals: how late Ctrl-C may be. The end of a transfer is noticed at once.
constexpr double kSliceSeconds = 0.05;
constexpr auto kSlice = std::chrono::milliseconds(50);

double seconds_since(Clock::time_point begun) noexcept {
  return std::chrono::duration<double>(Clock::now() - begun).count();
}

const char* name_of(IoOp op) noexcept {
  switch (op) {
    case IoOp::kRead:
      return "read";
    case IoOp::kWrite:
      return "write";
    case IoOp::kSync:
      return "fsync";
  }
  return "";
}

template <class Call>
auto without_gil(const Call& call) {
  const py::gil_scoped_release nogil;
  return call();
}

// Note [Waits that do not end]
// A drive may stop answering, and then a wait would last for ever. Every wait here goes in slices: it notices
// Ctrl-C, reports itself after `stall_seconds` (and after twice that, four times that, ...), and is given up
// once both it and the oldest request of the queue are older than `timeout_seconds`. The ticket then fails
// with ETIMEDOUT, but the kernel may still read or write the buffer: it is kept alive with the queue, and a
// transfer to or from the same memory waits for it. A close that is given up leaves thread, file and buffers
// to the process.
struct Patience {
  double stall_seconds;
  double timeout_seconds;
  py::object on_stall;  // called with what is waited for, for how long, and the oldest request in flight
};

enum class Waited : uint8_t { kOver, kTimeout, kGivenUp };

class PyTicket;

class PyQueue : public std::enable_shared_from_this<PyQueue> {
 public:
  PyQueue(const offload::QueueOptions& options, Patience patience)
      : path_(options.file.path), patience_(std::move(patience)), queue_(make(options)) {}

  ~PyQueue() {
    if (queue_->owned()) {
      const py::gil_scoped_release nogil;
      cancel_and_join();
      queue_.reset();
    }
    if (!abandoned_) return;  // only now may the buffers go: the members are destroyed after this body
    [[maybe_unused]] const auto* left_orphans = new auto(std::move(orphans_));
    [[maybe_unused]] const auto* left_registered = new auto(std::move(registered_));
  }

  std::unique_ptr<PyTicket> transfer(IoOp op, const py::object& object, uint64_t offset, int priority);
  std::unique_ptr<PyTicket> sync();

  bool preallocate(uint64_t size) {
    require_owned();
    const py::gil_scoped_release nogil;
    return queue_->preallocate(size);
  }

  // 0, or the errno of the refusal. What is registered stays alive until it is unregistered.
  int register_memory(const py::object& object) {
    require_owned();
    Buffer buffer(object, /*writable=*/true);
    const int error = without_gil([&] { return queue_->add_region({buffer.bytes(), buffer.size()}); });
    if (error == EBADF) raise_closed();
    if (error == 0) registered_.push_back(std::move(buffer));
    return error;
  }

  void unregister_memory(const py::object& object) {
    require_owned();
    const Buffer buffer(object, /*writable=*/true);
    const auto same = [&](const Buffer& held) {
      return held.bytes() == buffer.bytes() && held.size() == buffer.size();
    };
    const auto found = std::find_if(registered_.begin(), registered_.end(), same);
    if (found == registered_.end()) throw py::value_error("the buffer is not registered");
    Buffer held = std::move(*found);
    registered_.erase(found);
    without_gil([&] { return queue_->remove_region({held.bytes(), held.size()}); });
  }

  // False where it was given up.
  bool close(bool cancel) {
    if (!queue_->owned() || abandoned_) return true;
    queue_->request_close(cancel);
    const auto step = [&](auto slice) { return queue_->join_for(slice); };
    try {
      const double patience = cancel ? patience_for_cancel() : patience_.timeout_seconds;
      if (wait("close", std::nullopt, step, patience) == Waited::kGivenUp) abandon();
    } catch (...) {  // Ctrl-C: only what is in flight is still waited for
      const py::gil_scoped_release nogil;
      cancel_and_join();
      throw;
    }
    if (abandoned_) return false;
    orphans_.clear();
    registered_.clear();
    return true;
  }

  // Waits for `step(slice)` to say true, without the GIL. See Note [Waits that do not end].
  template <class Step>
  Waited wait(const char* what, std::optional<double> timeout, const Step& step) {
    return wait(what, timeout, step, patience_.timeout_seconds);
  }
  template <class Step>
  Waited wait(const char* what, std::optional<double> timeout, const Step& step, double patience) {
    const auto begun = Clock::now();
    double next_report = patience_.stall_seconds;
    for (;;) {
      const double waited = seconds_since(begun);
      const double slice = std::clamp(timeout.value_or(waited + 1.0) - waited, 0.0, kSliceSeconds);
      const auto limit = std::chrono::nanoseconds(static_cast<int64_t>(slice * 1e9));
      if (without_gil([&] { return step(limit); })) return Waited::kOver;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (timeout && waited >= *timeout) return Waited::kTimeout;
      if (waited >= patience && is_dead()) return Waited::kGivenUp;
      if (waited < next_report) continue;
      next_report = waited * 2;
      report_stall(what, waited);
    }
  }

  // Whether the drive does not answer any more, and something so old has to be given up.
  [[nodiscard]] bool is_hopeless(double seconds) const {
    return seconds >= patience_.timeout_seconds && is_dead();
  }

  // Takes over the buffer of a ticket that Python has dropped before it was done.
  void adopt(Buffer buffer, std::shared_ptr<offload::Ticket> ticket) {
    orphans_.emplace_back(std::move(buffer), std::move(ticket));
  }

  void require_owned() const {
    if (queue_->owned()) return;
    throw py::value_error("the queue of " + path_ + " belongs to process " +
                          std::to_string(queue_->owner_pid()) + "; open another one after the fork");
  }

  [[nodiscard]] IoQueue& queue() noexcept { return *queue_; }

 private:
  [[nodiscard]] bool is_dead() const {
    const auto oldest = queue_->stats().oldest();
    return oldest && oldest->seconds >= patience_.timeout_seconds;
  }

  // Once a request has been in flight for too long, the others are given a while, and not as long again.
  [[nodiscard]] double patience_for_cancel() const noexcept {
    return std::min(patience_.stall_seconds, patience_.timeout_seconds);
  }

  void abandon() noexcept {
    abandoned_ = true;
    queue_->abandon();
  }

  // Without the GIL.
  void cancel_and_join() {
    queue_->request_close(/*cancel=*/true);
    const auto begun = Clock::now();
    while (!abandoned_ && !queue_->join_for(kSlice)) {
      if (seconds_since(begun) >= patience_for_cancel() && is_dead()) abandon();
    }
  }

  void report_stall(const char* what, double seconds) {
    const auto oldest = queue_->stats().oldest();
    py::object request = py::none();
    if (oldest) request = py::make_tuple(name_of(oldest->op), oldest->offset, oldest->size, oldest->seconds);
    patience_.on_stall(what, seconds, queue_->capabilities().name, request);
  }

  // What was dropped may still be under way in memory that is used anew: a late read would overwrite it, a
  // late write would take its new bytes to the file.
  void wait_for_orphans(const Buffer& buffer);
  static std::unique_ptr<IoQueue> make(const offload::QueueOptions& options) {
    const py::gil_scoped_release nogil;
    return std::make_unique<IoQueue>(options);
  }

  std::shared_ptr<offload::Ticket> submit(const std::shared_ptr<offload::Transfer>& transfer);
  std::unique_ptr<PyTicket> wrap(std::optional<Buffer> buffer, std::shared_ptr<offload::Ticket> ticket);

  [[noreturn]] void raise_closed() const { throw py::value_error("the queue of " + path_ + " is closed"); }

  const std::string path_;
  const Patience patience_;
  bool abandoned_ = false;
  std::list<Buffer> registered_;
  std::list<std::pair<Buffer, std::shared_ptr<offload::Ticket>>> orphans_;
  std::unique_ptr<IoQueue> queue_;
};

// Keeps the buffer, and the queue, for as long as the kernel may touch the buffer. A ticket that is dropped
// early does not wait: it hands its buffer to the queue.
class PyTicket {
 public:
  PyTicket(std::shared_ptr<PyQueue> queue, std::optional<Buffer> buffer,
           std::shared_ptr<offload::Ticket> ticket)
      : queue_(std::move(queue)), buffer_(std::move(buffer)), ticket_(std::move(ticket)) {}
  PyTicket(const PyTicket&) = delete;
  PyTicket& operator=(const PyTicket&) = delete;

  ~PyTicket() {
    // In a forked child the transfer goes to the parent's memory, and the ticket's lock may be held for ever.
    if (!buffer_ || ticket_->done() || !queue_->queue().owned()) return;
    hand_over();
  }

  bool done() {
    if (given_up_) return true;
    if (ticket_->done()) {
      buffer_.reset();
      return true;
    }
    if (queue_->queue().owned() && queue_->is_hopeless(ticket_->seconds())) give_up();
    return given_up_;
  }

  bool wait(std::optional<double> timeout) {
    if (done()) return true;
    queue_->require_owned();
    const auto ticket = ticket_;
    const auto step = [&](auto slice) { return ticket->wait_for(slice); };
    if (queue_->wait(name_of(ticket->op()), timeout, step) == Waited::kGivenUp) give_up();
    return done();
  }

  void cancel() {
    if (done()) return;
    queue_->require_owned();
    queue_->queue().cancel(ticket_);
  }

  [[nodiscard]] int error() const noexcept { return given_up_ ? ETIMEDOUT : ticket_->error(); }
  [[nodiscard]] uint64_t bytes_done() const noexcept { return given_up_ ? 0 : ticket_->bytes_done(); }

  [[nodiscard]] const offload::Ticket& ticket() const noexcept { return *ticket_; }

 private:
  void hand_over() {
    if (buffer_) queue_->adopt(std::move(*buffer_), ticket_);
    buffer_.reset();
  }

  // Unless it has ended after all.
  void give_up() {
    given_up_ = !ticket_->done();
    if (given_up_) hand_over();
  }

  std::shared_ptr<PyQueue> queue_;
  bool given_up_ = false;
  std::optional<Buffer> buffer_;
  std::shared_ptr<offload::Ticket> ticket_;
};

std::unique_ptr<PyTicket> PyQueue::wrap(std::optional<Buffer> buffer,
                                        std::shared_ptr<offload::Ticket> ticket) {
  return std::make_unique<PyTicket>(shared_from_this(), std::move(buffer), std::move(ticket));
}

std::unique_ptr<PyTicket> PyQueue::transfer(IoOp op, const py::object& object, uint64_t offset,
                                            int priority) {
  require_owned();
  Buffer buffer(object, /*writable=*/op == IoOp::kRead);
  wait_for_orphans(buffer);
  if (offset > INT64_MAX - std::min<uint64_t>(buffer.size(), INT64_MAX)) {
    throw py::value_error("the transfer ends beyond the largest file offset, 2**63 - 1");
  }
  const auto urgency = static_cast<IoPriority>(priority);
  auto ticket = submit(IoQueue::make(op, buffer.bytes(), buffer.size(), offset, urgency));
  return wrap(std::move(buffer), std::move(ticket));
}

// Waits where there is no room for the bytes.
std::shared_ptr<offload::Ticket> PyQueue::submit(const std::shared_ptr<offload::Transfer>& transfer) {
  Added added = queue_->add_within({}, transfer);
  if (added == Added::kNoRoom) {
    const auto step = [&](auto slice) {
      added = queue_->add_within(slice, transfer);
      return added != Added::kNoRoom;
    };
    try {
      if (wait("room in the queue", std::nullopt, step) == Waited::kGivenUp) {
        throw offload::IoError(ETIMEDOUT, name_of(transfer->ticket->op()));
      }
    } catch (...) {
      queue_->leave_line(*transfer);
      throw;
    }
  }
  if (added == Added::kClosed) raise_closed();
  return transfer->ticket;
}

void PyQueue::wait_for_orphans(const Buffer& buffer) {
  std::erase_if(orphans_, [](const auto& orphan) { return orphan.second->done(); });
  std::vector<std::shared_ptr<offload::Ticket>> tickets;  // the list may change while the GIL is released
  for (const auto& [held, ticket] : orphans_)
    if (held.overlaps(buffer)) tickets.push_back(ticket);
  for (const auto& ticket : tickets) {
    const auto step = [&](auto slice) { return ticket->wait_for(slice); };
    if (wait("memory that an earlier transfer uses", std::nullopt, step) == Waited::kGivenUp) {
      throw offload::IoError(ETIMEDOUT, name_of(ticket->op()));
    }
  }
}

std::unique_ptr<PyTicket> PyQueue::sync() {
  require_owned();
  return wrap(std::nullopt, submit(IoQueue::make(IoOp::kSync, nullptr, 0, 0, IoPriority::kNeeded)));
}

offload::DirectIo parse_direct_io(const std::string& name) {
  if (name == "auto") return offload::DirectIo::kAuto;
  if (name == "required") return offload::DirectIo::kRequired;
  if (name == "off") return offload::DirectIo::kOff;
  throw py::value_error("direct_io must be 'auto', 'required' or 'off', got '" + name + "'");
}

std::shared_ptr<PyQueue> open_queue(const std::string& path, const std::string& backend, size_t queue_depth,
                                    uint64_t request_bytes, const std::string& direct_io, size_t threads,
                                    bool sqpoll, bool create, unsigned mode, uint64_t bytes_pending_max,
                                    double stall_seconds, double timeout_seconds, py::object on_stall,
                                    const std::optional<std::map<std::string, uint64_t>>& faults) {
  offload::QueueOptions options;
  options.file = {path, parse_direct_io(direct_io), create, static_cast<mode_t>(mode)};
  options.backend = backend;
  options.backend_options = {queue_depth, threads, sqpoll};
  options.request_bytes = request_bytes;
  options.bytes_pending_max = bytes_pending_max;
  if (faults) options.faults = offload::parse_faults(*faults);
  return std::make_shared<PyQueue>(options, Patience{stall_seconds, timeout_seconds, std::move(on_stall)});
}

py::dict stats_of(PyQueue& self) {
  self.require_owned();  // a forked child may have inherited the lock of the counters while it was held
  const auto direction = [&](IoOp op) {
    const offload::DirectionStats stats = self.queue().stats().read(op);
    py::dict out;
    out["bytes"] = stats.bytes;
    out["requests"] = stats.requests;
    out["resumed"] = stats.resumed;
    out["retried"] = stats.retried;
    out["buffered"] = stats.buffered;
    out["failed"] = stats.failed;
    out["in_flight_max"] = stats.in_flight_max;
    out["seconds_busy"] = stats.seconds_busy;
    py::dict at_depth;
    for (size_t i = 0; i < stats.seconds_at_depth.size(); ++i) {
      if (stats.seconds_at_depth[i] > 0) at_depth[py::int_(size_t{1} << i)] = stats.seconds_at_depth[i];
    }
    out["seconds_at_depth"] = at_depth;
    out["seconds_latency"] = stats.seconds_latency;
    out["seconds_latency_p50"] = stats.seconds_latency_p50;
    out["seconds_latency_p90"] = stats.seconds_latency_p90;
    out["seconds_latency_p99"] = stats.seconds_latency_p99;
    out["seconds_latency_max"] = stats.seconds_latency_max;
    return out;
  };
  py::dict out;
  out["read"] = direction(IoOp::kRead);
  out["write"] = direction(IoOp::kWrite);
  out["sync"] = direction(IoOp::kSync);
  out["cpu_seconds"] = self.queue().cpu_seconds();
  return out;
}

void raise_os_error(PyObject* type, const offload::IoError& error) {
  const py::tuple arguments = py::make_tuple(error.code().value(), error.operation());
  PyErr_SetObject(type, arguments.ptr());
}

}  // namespace

PYBIND11_MODULE(_aio, m) {
  m.doc() = "The I/O core: one queue per file. Use offload.aio.";

  static py::handle backend_error = PyErr_NewException("offload._aio.BackendError", PyExc_OSError, nullptr);
  m.attr("BackendError") = backend_error;
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const offload::BackendError& error) {
      raise_os_error(backend_error.ptr(), error);
    } catch (const offload::IoError& error) {
      raise_os_error(PyExc_OSError, error);
    }
  });

  py::class_<PyTicket>(m, "Ticket")
      .def("done", &PyTicket::done)
      .def("cancel", &PyTicket::cancel)
      .def("wait", &PyTicket::wait, py::arg("timeout") = py::none())
      .def_property_readonly("offset", [](const PyTicket& self) { return self.ticket().offset(); })
      .def_property_readonly("size", [](const PyTicket& self) { return self.ticket().size(); })
      .def_property_readonly("error", &PyTicket::error)
      .def_property_readonly("bytes_done", &PyTicket::bytes_done)
      .def_property_readonly("order", [](const PyTicket& self) { return self.ticket().order(); })
      .def_property_readonly("seconds", [](const PyTicket& self) { return self.ticket().seconds(); });

  py::class_<PyQueue, std::shared_ptr<PyQueue>>(m, "Queue")
      .def(py::init(&open_queue), py::kw_only(), py::arg("path"), py::arg("backend"), py::arg("queue_depth"),
           py::arg("request_bytes"), py::arg("direct_io"), py::arg("threads"), py::arg("sqpoll"),
           py::arg("create"), py::arg("mode"), py::arg("bytes_pending_max"), py::arg("stall_seconds"),
           py::arg("timeout_seconds"), py::arg("on_stall"), py::arg("faults") = py::none())
      .def(
          "read",
          [](PyQueue& self, const py::object& buffer, uint64_t offset, int priority) {
            return self.transfer(IoOp::kRead, buffer, offset, priority);
          },
          py::arg("buffer"), py::arg("offset"), py::arg("priority"))
      .def(
          "write",
          [](PyQueue& self, const py::object& buffer, uint64_t offset, int priority) {
            return self.transfer(IoOp::kWrite, buffer, offset, priority);
          },
          py::arg("buffer"), py::arg("offset"), py::arg("priority"))
      .def("sync", &PyQueue::sync)
      .def("register", &PyQueue::register_memory, py::arg("buffer"))
      .def("unregister", &PyQueue::unregister_memory, py::arg("buffer"))
      .def("preallocate", &PyQueue::preallocate, py::arg("size"))
      .def("close", &PyQueue::close, py::arg("cancel"))
      .def("stats", &stats_of)
      .def_property_readonly("alignment", [](PyQueue& self) { return self.queue().file().alignment(); })
      .def_property_readonly("direct", [](PyQueue& self) { return self.queue().file().direct(); })
      .def_property_readonly("direct_error", [](PyQueue& self) { return self.queue().file().direct_error(); })
      .def_property_readonly("backend", [](PyQueue& self) { return self.queue().capabilities().name; })
      .def_property_readonly("sqpoll", [](PyQueue& self) { return self.queue().capabilities().sqpoll; })
      .def_property_readonly("sqpoll_refused",
                             [](PyQueue& self) { return self.queue().capabilities().sqpoll_refused; })
      .def_property_readonly("queue_depth", [](PyQueue& self) { return self.queue().queue_depth(); });

  m.def("backend_names", [] {
    const auto names = offload::backend_names();
    return std::vector<std::string>(names.begin(), names.end());
  });
  m.def(
      "probe",
      [](const std::string& name) {
        const py::gil_scoped_release nogil;
        [[maybe_unused]] const auto backend = offload::make_backend(name, {});
      },
      py::arg("name"), "Makes and drops a backend; raises BackendError where the machine refuses it.");
}

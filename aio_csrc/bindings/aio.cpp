// The boundary of the I/O core with Python. It parses arguments, lets go of the GIL where it waits, and keeps
// buffers alive for as long as the kernel may touch them. Texts and hints are made in offload/aio.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
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

#include "io/backends.h"
#include "io/error.h"
#include "io/queue.h"

namespace py = pybind11;

namespace {

using offload::IoOp;
using offload::IoPriority;
using offload::IoQueue;

// Between two looks at pending signals: how late Ctrl-C may be. The end of a transfer is noticed at once.
constexpr auto kSignalSlice = std::chrono::milliseconds(50);

// A view of a Python object's bytes; the object cannot free or move them while it lives. Needs the GIL.
class Buffer {
 public:
  Buffer(const py::object& object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_FULL_RO) != 0) throw py::error_already_set();
    held_ = true;
    if (PyBuffer_IsContiguous(&view_, 'C') == 0) throw py::buffer_error("the buffer is not C-contiguous");
    if (writable && view_.readonly != 0)
      throw py::buffer_error("the buffer is read-only, and a read fills it");
  }
  Buffer(Buffer&& other) noexcept : view_(other.view_), held_(std::exchange(other.held_, false)) {}
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() { release(); }

  void release() noexcept {
    if (std::exchange(held_, false)) PyBuffer_Release(&view_);
  }
  [[nodiscard]] std::byte* bytes() const noexcept { return static_cast<std::byte*>(view_.buf); }
  [[nodiscard]] uint64_t size() const noexcept { return static_cast<uint64_t>(view_.len); }
  [[nodiscard]] bool overlaps(const Buffer& other) const noexcept {
    return bytes() < other.bytes() + other.size() && other.bytes() < bytes() + size();
  }

 private:
  Py_buffer view_{};
  bool held_ = false;
};

// Waits for `step(slice)` to say true, without the GIL, looking at signals in between. False after `timeout`.
template <class Step>
bool wait_in_slices(std::optional<double> timeout, const Step& step) {
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;
  const auto begun = Clock::now();
  for (;;) {
    auto slice = std::chrono::nanoseconds(kSignalSlice);
    const double left = timeout ? *timeout - Seconds(Clock::now() - begun).count() : 1.0;
    if (timeout) slice = std::clamp(std::chrono::nanoseconds(int64_t(std::min(left, 1.0) * 1e9)), {}, slice);
    bool over = false;
    {
      const py::gil_scoped_release nogil;
      over = step(slice);
    }
    if (over) return true;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (timeout && left <= 0) return false;
  }
}

template <class Call>
auto without_gil(const Call& call) {
  const py::gil_scoped_release nogil;
  return call();
}

class PyTicket;

class PyQueue : public std::enable_shared_from_this<PyQueue> {
 public:
  explicit PyQueue(const offload::QueueOptions& options) : path_(options.file.path), queue_(make(options)) {}

  ~PyQueue() {
    if (queue_->owned()) {
      const py::gil_scoped_release nogil;
      queue_.reset();
    }
    // Only now may the buffers go: the members are destroyed after this body.
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

  void close(bool cancel) {
    if (!queue_->owned()) return;
    queue_->request_close(cancel);
    const auto step = [&](auto slice) { return queue_->join_for(slice); };
    try {
      wait_in_slices(std::nullopt, step);
    } catch (...) {  // Ctrl-C: only what is in flight is still waited for
      queue_->request_close(/*cancel=*/true);
      const py::gil_scoped_release nogil;
      while (!queue_->join_for(kSignalSlice)) {
      }
      throw;
    }
    orphans_.clear();
    registered_.clear();
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
  // What was dropped may still be under way in memory that is used anew: a late read would overwrite it, a
  // late write would take its new bytes to the file.
  void wait_for_orphans(const Buffer& buffer);
  static std::unique_ptr<IoQueue> make(const offload::QueueOptions& options) {
    const py::gil_scoped_release nogil;
    return std::make_unique<IoQueue>(options);
  }

  std::unique_ptr<PyTicket> wrap(std::optional<Buffer> buffer, std::shared_ptr<offload::Ticket> ticket);

  [[noreturn]] void raise_closed() const { throw py::value_error("the queue of " + path_ + " is closed"); }

  const std::string path_;
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
    queue_->adopt(std::move(*buffer_), ticket_);
  }

  bool done() {
    if (!ticket_->done()) return false;
    buffer_.reset();
    return true;
  }

  bool wait(std::optional<double> timeout) {
    if (done()) return true;
    queue_->require_owned();
    const auto ticket = ticket_;
    if (!wait_in_slices(timeout, [&](auto slice) { return ticket->wait_for(slice); })) return false;
    return done();
  }

  [[nodiscard]] const offload::Ticket& ticket() const noexcept { return *ticket_; }

 private:
  std::shared_ptr<PyQueue> queue_;
  std::optional<Buffer> buffer_;
  std::shared_ptr<offload::Ticket> ticket_;
};

std::unique_ptr<PyTicket> PyQueue::wrap(std::optional<Buffer> buffer,
                                        std::shared_ptr<offload::Ticket> ticket) {
  if (ticket == nullptr) raise_closed();
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
  auto ticket = op == IoOp::kRead ? queue_->read(buffer.bytes(), buffer.size(), offset, urgency)
                                  : queue_->write(buffer.bytes(), buffer.size(), offset, urgency);
  return wrap(std::move(buffer), std::move(ticket));
}

void PyQueue::wait_for_orphans(const Buffer& buffer) {
  std::erase_if(orphans_, [](const auto& orphan) { return orphan.second->done(); });
  std::vector<std::shared_ptr<offload::Ticket>> tickets;  // the list may change while the GIL is released
  for (const auto& [held, ticket] : orphans_)
    if (held.overlaps(buffer)) tickets.push_back(ticket);
  for (const auto& ticket : tickets)
    wait_in_slices(std::nullopt, [&](auto slice) { return ticket->wait_for(slice); });
}

std::unique_ptr<PyTicket> PyQueue::sync() {
  require_owned();
  return wrap(std::nullopt, queue_->sync());
}

offload::DirectIo parse_direct_io(const std::string& name) {
  if (name == "auto") return offload::DirectIo::kAuto;
  if (name == "required") return offload::DirectIo::kRequired;
  if (name == "off") return offload::DirectIo::kOff;
  throw py::value_error("direct_io must be 'auto', 'required' or 'off', got '" + name + "'");
}

offload::FaultPlan parse_faults(const std::map<std::string, uint64_t>& faults) {
  offload::FaultPlan plan;
  const std::map<std::string, uint64_t*> fields = {
      {"seed", &plan.seed},
      {"short_one_in", &plan.short_one_in},
      {"eintr_one_in", &plan.eintr_one_in},
      {"eagain_one_in", &plan.eagain_one_in},
      {"fail_at", &plan.fail_at},
      {"fail_errno", &plan.fail_errno},
      {"fail_count", &plan.fail_count},
      {"sync_errno", &plan.sync_errno},
      {"delay_at", &plan.delay_at},
      {"delay_ms", &plan.delay_ms},
      {"reorder", &plan.reorder},
      {"refuse_direct", &plan.refuse_direct},
      {"submit_one", &plan.submit_one},
      {"bytes_per_second", &plan.bytes_per_second},
  };
  for (const auto& [name, value] : faults) {
    const auto field = fields.find(name);
    if (field == fields.end()) throw py::value_error("no fault is called '" + name + "'");
    *field->second = value;
  }
  return plan;
}

std::shared_ptr<PyQueue> open_queue(const std::string& path, const std::string& backend, size_t queue_depth,
                                    uint64_t request_bytes, const std::string& direct_io, size_t threads,
                                    bool sqpoll, bool create, unsigned mode,
                                    const std::optional<std::map<std::string, uint64_t>>& faults) {
  offload::QueueOptions options;
  options.file = {path, parse_direct_io(direct_io), create, static_cast<mode_t>(mode)};
  options.backend = backend;
  options.backend_options = {queue_depth, threads, sqpoll};
  options.request_bytes = request_bytes;
  if (faults) options.faults = parse_faults(*faults);
  return std::make_shared<PyQueue>(options);
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
      .def("wait", &PyTicket::wait, py::arg("timeout") = py::none())
      .def_property_readonly("offset", [](const PyTicket& self) { return self.ticket().offset(); })
      .def_property_readonly("size", [](const PyTicket& self) { return self.ticket().size(); })
      .def_property_readonly("error", [](const PyTicket& self) { return self.ticket().error(); })
      .def_property_readonly("bytes_done", [](const PyTicket& self) { return self.ticket().bytes_done(); })
      .def_property_readonly("order", [](const PyTicket& self) { return self.ticket().order(); })
      .def_property_readonly("seconds", [](const PyTicket& self) { return self.ticket().seconds(); });

  py::class_<PyQueue, std::shared_ptr<PyQueue>>(m, "Queue")
      .def(py::init(&open_queue), py::kw_only(), py::arg("path"), py::arg("backend"), py::arg("queue_depth"),
           py::arg("request_bytes"), py::arg("direct_io"), py::arg("threads"), py::arg("sqpoll"),
           py::arg("create"), py::arg("mode"), py::arg("faults") = py::none())
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

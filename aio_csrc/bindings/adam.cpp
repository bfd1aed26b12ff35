// Python face of the CPU optimizer kernels; see bindings/arrays.h for what crosses it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <vector>

#include "arrays.h"
#include "optim/adam.h"
#include "optim/arrays.h"
#include "optim/isa.h"
#include "util/crc32c.h"

namespace py = pybind11;
namespace optim = offload::optim;
using namespace offload::bindings;

namespace {

// The planes of the moments, whose element sizes tell the format.
class StatePlanes {
 public:
  StatePlanes(const py::buffer& exp_avg, const py::buffer& exp_avg_sq, const std::optional<py::buffer>& scale,
              size_t count, bool writable)
      : exp_avg_(exp_avg, "exp_avg", writable), exp_avg_sq_(exp_avg_sq, "exp_avg_sq", writable) {
    if (scale) scale_.emplace(*scale, "scale", writable);
    if (exp_avg_.itemsize() == sizeof(int8_t)) {
      if (!scale_) throw std::invalid_argument("int8 moments need scale");
      format_ = optim::StateFormat::kInt8;
      planes_.exp_avg = exp_avg_.elements<int8_t>(count);
      planes_.exp_avg_sq = exp_avg_sq_.elements<uint8_t>(count);
      const size_t blocks = count / optim::kStateBlock + (count % optim::kStateBlock != 0);
      planes_.scale = scale_->elements<float>(2 * blocks);
      return;
    }
    if (scale_) throw std::invalid_argument("only int8 moments have a scale");
    if (exp_avg_.itemsize() == sizeof(optim::Bf16)) {
      format_ = optim::StateFormat::kBf16;
      planes_.exp_avg = exp_avg_.elements<optim::Bf16>(count);
      planes_.exp_avg_sq = exp_avg_sq_.elements<optim::Bf16>(count);
    } else {
      planes_.exp_avg = exp_avg_.elements<float>(count);
      planes_.exp_avg_sq = exp_avg_sq_.elements<float>(count);
    }
  }
  [[nodiscard]] optim::StateFormat format() const { return format_; }
  [[nodiscard]] const optim::MomentPlanes& planes() const { return planes_; }
  [[nodiscard]] std::vector<const Array*> arrays() const {
    std::vector<const Array*> all{&exp_avg_, &exp_avg_sq_};
    if (scale_) all.push_back(&*scale_);
    return all;
  }

 private:
  Array exp_avg_;
  Array exp_avg_sq_;
  std::optional<Array> scale_;
  optim::StateFormat format_ = optim::StateFormat::kFp32;
  optim::MomentPlanes planes_{};
};

using Segment = std::tuple<int64_t, int64_t, int64_t, uint64_t, double, double, double, double, double>;

std::vector<optim::AdamSegment> to_segments(const std::vector<Segment>& tuples) {
  std::vector<optim::AdamSegment> segments;
  segments.reserve(tuples.size());
  for (const auto& [begin, end, step, element, lr, beta1, beta2, eps, weight_decay] : tuples) {
    const optim::Span span = to_span(segments.size(), begin, end, step, element);
    segments.push_back({span, lr, beta1, beta2, eps, weight_decay});
  }
  return segments;
}

void run_adam(const py::buffer& weight, const std::optional<py::buffer>& residual, const py::buffer& exp_avg,
              const py::buffer& exp_avg_sq, const std::optional<py::buffer>& scale, const py::buffer& grad,
              const std::vector<Segment>& segment_tuples, bool adamw_mode, double grad_scale, uint64_t seed,
              unsigned threads, std::string_view isa) {
  const optim::KernelTable& kernels = optim::kernels_for(isa);
  const MasterPlanes master(weight, residual, grad);
  const size_t count = master.count();
  const StatePlanes state(exp_avg, exp_avg_sq, scale, count, true);
  const bool is_int8 = state.format() == optim::StateFormat::kInt8;
  if (is_int8 && !master.has_residual()) {
    throw std::invalid_argument("int8 moments need bf16 weights and their residual");
  }
  const auto [planes, format] =
      is_int8 ? master.planes<int8_t>(state.planes()) : master.planes<int16_t>(state.planes());
  std::vector<const Array*> arrays = state.arrays();
  for (const Array* array : master.arrays()) arrays.push_back(array);
  refuse_overlap(arrays);
  const std::vector<optim::AdamSegment> segments = to_segments(segment_tuples);
  const optim::AdamOptions options{
      .decoupled = adamw_mode, .grad_scale = grad_scale, .seed = seed, .threads = threads};
  const py::gil_scoped_release nogil;
  optim::adam_update(kernels, {state.format(), format}, planes, count, segments, options);
}

void run_encode_moments(const py::buffer& exp_avg_buffer, const py::buffer& exp_avg_sq_buffer,
                        const py::buffer& to_exp_avg, const py::buffer& to_exp_avg_sq,
                        const std::optional<py::buffer>& to_scale, unsigned threads, std::string_view isa) {
  const optim::KernelTable& kernels = optim::kernels_for(isa);
  const Array exp_avg(exp_avg_buffer, "exp_avg", false);
  const Array exp_avg_sq(exp_avg_sq_buffer, "exp_avg_sq", false);
  const size_t count = exp_avg.count();
  const StatePlanes state(to_exp_avg, to_exp_avg_sq, to_scale, count, true);
  if (state.format() == optim::StateFormat::kFp32) throw std::invalid_argument("fp32 moments need no coding");
  for (const Array* source : {&exp_avg, &exp_avg_sq}) {  // these two may be one array
    std::vector<const Array*> arrays = state.arrays();
    arrays.push_back(source);
    refuse_overlap(arrays);
  }
  const auto* m = exp_avg.elements<float>(count);
  const auto* v = exp_avg_sq.elements<float>(count);
  const py::gil_scoped_release nogil;
  optim::encode_moments(kernels, state.format(), m, v, state.planes(), count, threads);
}

void run_decode_moments(const py::buffer& from_exp_avg, const py::buffer& from_exp_avg_sq,
                        const std::optional<py::buffer>& from_scale, const py::buffer& exp_avg_buffer,
                        const py::buffer& exp_avg_sq_buffer, unsigned threads, std::string_view isa) {
  const optim::KernelTable& kernels = optim::kernels_for(isa);
  const Array exp_avg(exp_avg_buffer, "exp_avg", true);
  const Array exp_avg_sq(exp_avg_sq_buffer, "exp_avg_sq", true);
  const size_t count = exp_avg.count();
  const StatePlanes state(from_exp_avg, from_exp_avg_sq, from_scale, count, false);
  if (state.format() == optim::StateFormat::kFp32) throw std::invalid_argument("fp32 moments need no coding");
  std::vector<const Array*> arrays = state.arrays();
  arrays.insert(arrays.end(), {&exp_avg, &exp_avg_sq});
  refuse_overlap(arrays);
  auto* m = exp_avg.elements<float>(count);
  auto* v = exp_avg_sq.elements<float>(count);
  const py::gil_scoped_release nogil;
  optim::decode_moments(kernels, state.format(), state.planes(), m, v, count, threads);
}

void run_block_square_sums(const py::buffer& values_buffer, const py::buffer& sums_buffer, unsigned threads,
                           std::string_view isa) {
  const optim::KernelTable& kernels = optim::kernels_for(isa);
  const Array values(values_buffer, "grad", false);
  const Array sums(sums_buffer, "sums", true);
  const size_t count = values.count();
  auto* out = sums.elements<double>(count / optim::kSquareBlock + (count % optim::kSquareBlock != 0));
  if (values.is_fp16()) {
    const auto* elements = values.elements<optim::Fp16>(count);
    const py::gil_scoped_release nogil;
    optim::block_square_sums(kernels, elements, count, out, threads);
  } else if (values.itemsize() == sizeof(optim::Bf16)) {
    const auto* elements = values.elements<optim::Bf16>(count);
    const py::gil_scoped_release nogil;
    optim::block_square_sums(kernels, elements, count, out, threads);
  } else {
    const auto* elements = values.elements<float>(count);
    const py::gil_scoped_release nogil;
    optim::block_square_sums(kernels, elements, count, out, threads);
  }
}

// Calls run with the residual as a pointer to its own type, int8_t or int16_t.
template <class Run>
void with_residual(const Array& residual, size_t count, const Run& run) {
  if (residual.itemsize() == sizeof(int8_t)) {
    run(residual.elements<int8_t>(count));
  } else {
    run(residual.elements<int16_t>(count));
  }
}

void run_split_master(const py::buffer& master_buffer, const py::buffer& weight_buffer,
                      const py::buffer& residual_buffer, unsigned threads, std::string_view isa) {
  const optim::KernelTable& kernels = optim::kernels_for(isa);
  const Array master(master_buffer, "master", false);
  const Array weight(weight_buffer, "weight", true);
  const Array residual(residual_buffer, "residual", true);
  refuse_overlap({&master, &weight, &residual});
  const size_t count = master.count();
  const auto* from = master.elements<float>(count);
  auto* to_weight = weight.elements<optim::Bf16>(count);
  with_residual(residual, count, [&](auto* to_residual) {
    const py::gil_scoped_release nogil;
    optim::split_master(kernels, from, to_weight, to_residual, count, threads);
  });
}

void run_join_master(const py::buffer& weight_buffer, const py::buffer& residual_buffer,
                     const py::buffer& master_buffer, unsigned threads, std::string_view isa) {
  const optim::KernelTable& kernels = optim::kernels_for(isa);
  const Array weight(weight_buffer, "weight", false);
  const Array residual(residual_buffer, "residual", false);
  const Array master(master_buffer, "master", true);
  refuse_overlap({&weight, &residual, &master});
  const size_t count = weight.count();
  const auto* from_weight = weight.elements<optim::Bf16>(count);
  auto* to = master.elements<float>(count);
  with_residual(residual, count, [&](const auto* from_residual) {
    const py::gil_scoped_release nogil;
    optim::join_master(kernels, from_weight, from_residual, to, count, threads);
  });
}

void run_assign_weight(const py::buffer& weight_buffer, const py::buffer& residual_buffer,
                       const py::buffer& fresh_buffer, unsigned threads, std::string_view isa) {
  const optim::KernelTable& kernels = optim::kernels_for(isa);
  const Array weight(weight_buffer, "weight", true);
  const Array residual(residual_buffer, "residual", true);
  const Array fresh(fresh_buffer, "fresh", false);
  refuse_overlap({&weight, &residual, &fresh});
  const size_t count = weight.count();
  auto* to_weight = weight.elements<optim::Bf16>(count);
  const auto* from = fresh.elements<optim::Bf16>(count);
  with_residual(residual, count, [&](auto* to_residual) {
    const py::gil_scoped_release nogil;
    optim::assign_weight(kernels, to_weight, to_residual, from, count, threads);
  });
}

void run_crc32c(const py::buffer& data_buffer, const py::buffer& cuts_buffer, const py::buffer& sums_buffer,
                unsigned threads, std::string_view way) {
  const Array data(data_buffer, "data", false);
  const Array cuts(cuts_buffer, "cuts", false);
  const Array sums(sums_buffer, "sums", true);
  const auto* bytes = data.elements<std::byte>(data.count());
  const std::span at(cuts.elements<uint64_t>(cuts.count()), cuts.count());
  auto* to = sums.elements<uint32_t>(at.empty() ? 0 : at.size() - 1);
  if (!std::is_sorted(at.begin(), at.end()) || (!at.empty() && at.back() > data.count())) {
    throw std::invalid_argument("cuts must ascend and lie within data");
  }
  const py::gil_scoped_release nogil;
  offload::crc32c(bytes, at, to, threads, way);
}

}  // namespace

PYBIND11_MODULE(_adam, m) {
  m.doc() = "CPU optimizer kernels over flat arrays. Use offload.optim.kernels.";
  m.attr("SQUARE_BLOCK") = optim::kSquareBlock;
  m.def("isas", &optim::supported_isas);
  m.attr("STATE_BLOCK") = optim::kStateBlock;
  m.def("adam", &run_adam, py::arg("weight"), py::arg("residual"), py::arg("exp_avg"), py::arg("exp_avg_sq"),
        py::arg("scale"), py::arg("grad"), py::arg("segments"), py::kw_only(), py::arg("adamw_mode"),
        py::arg("grad_scale"), py::arg("seed"), py::arg("threads"), py::arg("isa"));
  m.def("encode_moments", &run_encode_moments, py::arg("exp_avg"), py::arg("exp_avg_sq"),
        py::arg("to_exp_avg"), py::arg("to_exp_avg_sq"), py::arg("to_scale"), py::kw_only(),
        py::arg("threads"), py::arg("isa"));
  m.def("decode_moments", &run_decode_moments, py::arg("from_exp_avg"), py::arg("from_exp_avg_sq"),
        py::arg("from_scale"), py::arg("exp_avg"), py::arg("exp_avg_sq"), py::kw_only(), py::arg("threads"),
        py::arg("isa"));
  m.def("block_square_sums", &run_block_square_sums, py::arg("values"), py::arg("sums"), py::kw_only(),
        py::arg("threads"), py::arg("isa"));
  m.def("split_master", &run_split_master, py::arg("master"), py::arg("weight"), py::arg("residual"),
        py::kw_only(), py::arg("threads"), py::arg("isa"));
  m.def("join_master", &run_join_master, py::arg("weight"), py::arg("residual"), py::arg("master"),
        py::kw_only(), py::arg("threads"), py::arg("isa"));
  m.def("assign_weight", &run_assign_weight, py::arg("weight"), py::arg("residual"), py::arg("fresh"),
        py::kw_only(), py::arg("threads"), py::arg("isa"));
  bind_rules(m);
  m.def("crc32c", &run_crc32c, py::arg("data"), py::arg("cuts"), py::arg("sums"), py::kw_only(),
        py::arg("threads"), py::arg("way"));
  m.def("crc32c_ways", &offload::crc32c_ways);
}

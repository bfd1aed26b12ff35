// Python face of Lion, Adagrad and SGD; see bindings/arrays.h for what crosses it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <vector>

#include "arrays.h"
#include "optim/isa.h"
#include "optim/rule_update.h"

namespace offload::bindings {
namespace {

template <class Segment>
using Update = void (*)(const optim::RuleTable&, const optim::AdamPlanes&, size_t, std::span<const Segment>,
                        const optim::RuleOptions&);

// Segments come as tuples: those of a span first, then the numbers of the rule.
template <class Segment, Update<Segment> update, class... Numbers>
void run_rule(const py::buffer& weight, const std::optional<py::buffer>& residual,
              const std::optional<py::buffer>& moment, const py::buffer& grad,
              const std::vector<std::tuple<int64_t, int64_t, int64_t, uint64_t, Numbers...>>& tuples,
              double grad_scale, uint64_t seed, unsigned threads, std::string_view isa) {
  const optim::RuleTable& rules = optim::rules_for(isa);
  const MasterPlanes master(weight, residual, grad);
  const size_t count = master.count();
  std::vector<const Array*> arrays = master.arrays();
  std::optional<Array> state;
  optim::MomentPlanes moments{};
  optim::StateFormat format = optim::StateFormat::kFp32;
  if (moment) {
    state.emplace(*moment, "the moment", true);
    arrays.push_back(&*state);
    if (state->itemsize() == sizeof(optim::Bf16)) {
      format = optim::StateFormat::kBf16;
      moments.exp_avg = state->elements<optim::Bf16>(count);
    } else {
      moments.exp_avg = state->elements<float>(count);
    }
  }
  refuse_overlap(arrays);
  const auto [planes, plane_format] = master.planes<int16_t>(moments);
  std::vector<Segment> segments;
  for (const auto& tuple : tuples) {
    std::apply(
        [&](int64_t begin, int64_t end, int64_t step, uint64_t element, Numbers... numbers) {
          segments.push_back({to_span(segments.size(), begin, end, step, element), numbers...});
        },
        tuple);
  }
  const optim::RuleOptions options{
      .moment = format, .planes = plane_format, .grad_scale = grad_scale, .seed = seed, .threads = threads};
  const py::gil_scoped_release nogil;
  update(rules, planes, count, segments, options);
}

}  // namespace

void bind_rules(py::module_& m) {
  const auto bind = [&m](const char* name, auto* run) {
    m.def(name, run, py::arg("weight"), py::arg("residual"), py::arg("moment"), py::arg("grad"),
          py::arg("segments"), py::kw_only(), py::arg("grad_scale"), py::arg("seed"), py::arg("threads"),
          py::arg("isa"));
  };
  bind("lion", &run_rule<optim::LionSegment, &optim::lion_update, double, double, double, double>);
  bind("adagrad",
       &run_rule<optim::AdagradSegment, &optim::adagrad_update, double, double, double, double, double>);
  bind("sgd", &run_rule<optim::SgdSegment, &optim::sgd_update, double, double, double, double, bool>);
}

}  // namespace offload::bindings

#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <string>

#include "io/faulty_backend.h"

namespace offload {

// A plan from its fields by name; throws ValueError for a name that is none.
inline FaultPlan parse_faults(const std::map<std::string, uint64_t>& faults) {
  FaultPlan plan;
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
      {"tear_at", &plan.tear_at},
      {"tear_one_in", &plan.tear_one_in},
      {"tear_silently_at", &plan.tear_silently_at},
      {"tear_silently_one_in", &plan.tear_silently_one_in},
      {"lose_at", &plan.lose_at},
      {"lose_one_in", &plan.lose_one_in},
      {"submit_one", &plan.submit_one},
      {"bytes_per_second", &plan.bytes_per_second},
  };
  for (const auto& [name, value] : faults) {
    const auto field = fields.find(name);
    if (field == fields.end()) throw pybind11::value_error("no fault is called '" + name + "'");
    *field->second = value;
  }
  return plan;
}

}  // namespace offload

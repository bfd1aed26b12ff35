#include "optim/isa.h"

#include <stdexcept>

namespace offload::optim {
namespace {

struct Isa {
  const char* name;
  const KernelTable* kernels;
  const RuleTable* rules;
  bool (*supported)();
};

// The builtin also asks whether the operating system saves the wide registers (XGETBV).
constexpr Isa kIsas[] = {
#if defined(__x86_64__)
    {"avx512", &kAvx512Kernels, &kAvx512Rules,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
     }},
    {"avx2", &kAvx2Kernels, &kAvx2Rules,
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c");
     }},
#elif defined(__aarch64__)
    {"neon", &kNeonKernels, &kNeonRules, [] { return true; }},
#endif
    {"scalar", &kScalarKernels, &kScalarRules, [] { return true; }},
};

const Isa& find(std::string_view name) {
  for (const Isa& isa : kIsas) {
    if (name == isa.name && isa.supported()) return isa;
  }
  std::string usable;
  for (const std::string& isa : supported_isas()) usable += (usable.empty() ? "" : ", ") + isa;
  throw std::invalid_argument("isa '" + std::string(name) +
                              "' is not supported here; choose auto or one of: " + usable);
}

}  // namespace

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas) {
    if (isa.supported()) names.emplace_back(isa.name);
  }
  return names;
}

const KernelTable& kernels_for(std::string_view name) { return *find(name).kernels; }

const RuleTable& rules_for(std::string_view name) { return *find(name).rules; }

}  // namespace offload::optim

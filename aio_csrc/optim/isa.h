// Which kernels this processor can run.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "optim/kernel_table.h"
#include "optim/rule_table.h"

namespace offload::optim {

// Names of the instruction sets that this processor and this operating system support, best first; the
// last is "scalar".
std::vector<std::string> supported_isas();

// The kernels of one instruction set. Throws std::invalid_argument for a name that is unknown or not
// supported here.
const KernelTable& kernels_for(std::string_view isa);
const RuleTable& rules_for(std::string_view isa);

}  // namespace offload::optim

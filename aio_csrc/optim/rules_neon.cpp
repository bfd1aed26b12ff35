// Lion, Adagrad and SGD for NEON, which every 64-bit ARM processor has.
#include "optim/rules.h"
#include "optim/vec_neon.h"

namespace offload::optim {

constinit const RuleTable kNeonRules = make_rule_table<VecNeon, VecNeon>();

}  // namespace offload::optim

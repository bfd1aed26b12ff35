// Lion, Adagrad and SGD for the baseline of the architecture.
#include "optim/rules.h"
#include "optim/vec_scalar.h"

namespace offload::optim {

constinit const RuleTable kScalarRules = make_rule_table<VecScalar, VecScalar>();

}  // namespace offload::optim

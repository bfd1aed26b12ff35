// Lion, Adagrad and SGD for AVX-512. Data only outside this file: entered through the table, after a check of
// the processor at run time.
#include "optim/rules.h"
#include "optim/vec_avx512.h"

namespace offload::optim {

constinit const RuleTable kAvx512Rules = make_rule_table<VecAvx512, VecAvx512>();

}  // namespace offload::optim

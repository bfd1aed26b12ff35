// Lion, Adagrad and SGD for AVX2 and FMA. Data only outside this file: entered through the table, after a
// check of the processor at run time.
#include "optim/rules.h"
#include "optim/vec_avx2.h"

namespace offload::optim {

constinit const RuleTable kAvx2Rules = make_rule_table<VecAvx2<InOrder>, VecAvx2<InPairs>>();

}  // namespace offload::optim

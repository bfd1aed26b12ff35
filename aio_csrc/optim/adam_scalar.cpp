// The kernels for the baseline instruction set. Data only outside this file: entered through the table, after
// a check of the processor at run time.
#include "optim/kernels.h"
#include "optim/vec_scalar.h"

namespace offload::optim {

constinit const KernelTable kScalarKernels = make_kernel_table<VecScalar, VecScalar>();

}  // namespace offload::optim

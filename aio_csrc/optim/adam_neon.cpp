// The kernels for NEON, which every 64-bit ARM processor has.
#include "optim/kernels.h"
#include "optim/vec_neon.h"

namespace offload::optim {

constinit const KernelTable kNeonKernels = make_kernel_table<VecNeon, VecNeon>();

}  // namespace offload::optim

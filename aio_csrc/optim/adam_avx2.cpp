// The kernels for AVX2 and FMA. Data only outside this file: entered through the table, after a check
// of the processor at run time.
#include "optim/kernels.h"
#include "optim/vec_avx2.h"

namespace offload::optim {

constinit const KernelTable kAvx2Kernels = make_kernel_table<VecAvx2<InOrder>, VecAvx2<InPairs>>();

}  // namespace offload::optim

// The kernels for AVX-512 F, BW, DQ and VL. Data only outside this file: entered through the table, after a
// check of the processor at run time.
#include "optim/kernels.h"
#include "optim/vec_avx512.h"
#include "optim/vec_avx512_pairs.h"

namespace offload::optim {

constinit const KernelTable kAvx512Kernels = make_kernel_table<VecAvx512, VecAvx512Pairs>();

}  // namespace offload::optim

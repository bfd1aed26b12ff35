// The hot loops of one instruction set, as plain functions over plain arrays.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload::optim {

// Upper half of an IEEE single.
struct Bf16 {
  uint16_t bits;
};

// Note [Master in two planes]
// With bf16 weights the fp32 master is the integer sum (weight << 16) + residual of its bit patterns:
// `weight` is the master rounded half up to bf16, and therefore also the copy that the model computes with,
// and `residual` is what rounding took away; it always fits 16 bits. The sum restores every finite master and
// both infinities bit for bit. A master that rounds beyond the largest bf16 shows as an infinite weight and
// is still exact. Rounding a NaN could carry into the sign and show a finite weight, so a NaN is first
// replaced by the canonical one, which has a zero lower half.
inline constexpr uint32_t kCanonicalNan = 0x7FC00000;
inline constexpr uint32_t kHalfUnit = 0x8000;  // half of the last place that the weight keeps

// The coefficients of one Adam step, in the precision of the loop. Made by make_coefficients() only.
struct AdamCoefficients {
  float grad_scale;
  float keep;             // 1 - lr * weight_decay, or 1: what decoupled decay leaves of the master
  float decay_into_grad;  // weight_decay of the L2 form, or 0
  float lerp_weight;
  bool lerp_from_grad;  // beta1 <= 0.5: interpolate from the nearer end, as torch.lerp does
  float beta2;
  float one_minus_beta2;
  float bias2_sqrt;  // sqrt(1 - beta2^step)
  float eps;
  float step_size;  // lr / (1 - beta1^step)
};

struct AdamPlanes {
  void* weight;       // Bf16 or float, by format
  int16_t* residual;  // only beside Bf16 weights
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;  // Bf16 or float, by format
};

// Order of KernelTable::adam.
enum class AdamFormat : uint8_t { kBf16WeightBf16Grad, kBf16WeightFp32Grad, kFp32WeightFp32Grad };
inline constexpr size_t kAdamFormatCount = 3;

// Elements per partial sum of squares. Part of the result: another value rounds differently.
inline constexpr size_t kSquareBlock = 16384;

struct KernelTable {
  using Adam = void (*)(const AdamCoefficients&, const AdamPlanes&, size_t begin, size_t end);
  Adam adam[kAdamFormatCount];
  // Sum of squares of at most kSquareBlock elements. Never overflows: a finite result means finite elements.
  double (*square_sum_bf16)(const Bf16* values, size_t count);
  double (*square_sum_fp32)(const float* values, size_t count);
  void (*split_master)(const float* master, Bf16* weight, int16_t* residual, size_t count);
  void (*join_master)(const Bf16* weight, const int16_t* residual, float* master, size_t count);
  // weight = fresh; the residual is kept where that changes nothing and zero elsewhere.
  void (*assign_weight)(Bf16* weight, int16_t* residual, const Bf16* fresh, size_t count);
};

extern const KernelTable kScalarKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

}  // namespace offload::optim

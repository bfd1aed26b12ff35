// The hot loops of one instruction set, as plain functions over plain arrays.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload::optim {

// Upper half of an IEEE single.
struct Bf16 {
  uint16_t bits;
};

// IEEE half.
struct Fp16 {
  uint16_t bits;
};

// Note [Master in two planes]
// With bf16 weights the fp32 master is the integer sum (weight << 16) + residual of its bit patterns:
// `weight` is the master rounded half up to bf16, and therefore also the copy that the model computes with,
// and `residual` is what rounding took away; it always fits 16 bits. The sum restores every finite master and
// both infinities bit for bit. A master that rounds beyond the largest bf16 shows as an infinite weight and
// is still exact. Rounding a NaN could carry into the sign and show a finite weight, so a NaN is first
// replaced by the canonical one, which has a zero lower half.
// An 8-bit residual holds the upper byte of the 16-bit one: a master of 24 bits, in units of 1/256 of the
// weight's last place, as in FlashOptim. A step rounds to it stochastically, or small steps would be lost.
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
  float eps;         // times bias2_sqrt where moments are rounded
  float step_size;   // lr / (1 - beta1^step), times bias2_sqrt where moments are rounded
};

// How the moments are stored. kInt8 is blockwise, beside Bf16 weights only, and has an 8-bit residual.
enum class StateFormat : uint8_t { kFp32, kBf16, kInt8 };
inline constexpr size_t kStateFormatCount = 3;

struct MomentPlanes {
  void* exp_avg;     // float, Bf16 or int8_t, by format
  void* exp_avg_sq;  // float, Bf16 or uint8_t, by format
  float* scale;      // of kInt8: one of exp_avg and one of exp_avg_sq for each block
};

struct AdamPlanes {
  void* weight;    // Bf16 or float, by format
  void* residual;  // only beside Bf16 weights: int8_t with kInt8, else int16_t
  MomentPlanes moments;
  const void* grad;  // Bf16, Fp16 or float, by format
};

// Order of the columns of the tables.
enum class PlaneFormat : uint8_t {
  kBf16WeightBf16Grad,
  kBf16WeightFp16Grad,
  kBf16WeightFp32Grad,
  kFp32WeightFp16Grad,
  kFp32WeightFp32Grad
};
inline constexpr size_t kPlaneFormatCount = 5;

// What one run of elements needs to hash its own numbers into noise. `first` is the lower half of the number,
// in the whole model, of the element at index 0 of the planes.
struct NoiseKeys {
  uint32_t before;
  uint32_t between;
  uint32_t first;
};

// Elements that share their scales in the format kInt8. Part of the format.
inline constexpr size_t kStateBlock = 128;

// Elements per partial sum of squares. Part of the result: another value rounds differently.
inline constexpr size_t kSquareBlock = 16384;

// Conversions of the master in two planes. With an 8-bit residual it is rounded half up to 24 bits.
template <class Residual>
struct MasterKernels {
  void (*split)(const float* master, Bf16* weight, Residual* residual, size_t count);
  void (*join)(const Bf16* weight, const Residual* residual, float* master, size_t count);
  // weight = fresh; the residual is kept where that changes nothing and zero elsewhere.
  void (*assign)(Bf16* weight, Residual* residual, const Bf16* fresh, size_t count);
};

struct KernelTable {
  // With kInt8, `begin` lies on a block; if `end` does not, the rest of its block is not touched.
  using Adam = void (*)(const AdamCoefficients&, const NoiseKeys&, const AdamPlanes&, size_t begin,
                        size_t end);
  Adam adam[kStateFormatCount][kPlaneFormatCount];
  // Fp32 moments to `planes`, rounded to nearest, and back. kFp32 has none.
  void (*encode_moments[kStateFormatCount])(const float* exp_avg, const float* exp_avg_sq,
                                            const MomentPlanes& planes, size_t begin, size_t end);
  void (*decode_moments[kStateFormatCount])(const MomentPlanes& planes, float* exp_avg, float* exp_avg_sq,
                                            size_t begin, size_t end);
  // Sum of squares of at most kSquareBlock elements. Never overflows: a finite result means finite elements.
  double (*square_sum_bf16)(const Bf16* values, size_t count);
  double (*square_sum_fp16)(const Fp16* values, size_t count);
  double (*square_sum_fp32)(const float* values, size_t count);
  MasterKernels<int16_t> master16;
  MasterKernels<int8_t> master8;
};

extern const KernelTable kScalarKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#elif defined(__aarch64__)
extern const KernelTable kNeonKernels;
#endif

}  // namespace offload::optim

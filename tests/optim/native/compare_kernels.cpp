// Runs the kernels of a vector instruction set and the scalar ones on the same bytes, and tells where they
// differ. Needs no Python, so that it runs under an emulator of another processor.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "optim/fp_environment.h"
#include "optim/kernel_table.h"

using namespace offload::optim;

namespace {

#if defined(__aarch64__)
const KernelTable& vector_kernels = kNeonKernels;
#else
const KernelTable& vector_kernels = kAvx2Kernels;
#endif

constexpr size_t kCount = 5 * kStateBlock + 77;

uint64_t state = 1;

uint32_t random_bits() {  // splitmix64
  uint64_t x = state += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return static_cast<uint32_t>((x ^ (x >> 31)) >> 16);
}

// Ordinary numbers; where `wild`, also any bits, and what is special: a NaN in every block of 8-bit moments.
bool wild = true;

float random_float() {
  static const uint32_t special[] = {0,          0x80000000, 1,          0x80000001, 0x007FFFFF, 0x7F7FFFFF,
                                     0x7F800000, 0xFF800000, 0x7FC00000, 0x3F800000, 0x00010000, 0x7F7F8000};
  const uint32_t kind = random_bits() % 16;
  uint32_t bits = random_bits();
  if (wild && kind == 0) bits = special[bits % (sizeof(special) / sizeof(special[0]))];
  if (!wild || kind > 1) bits = (bits & 0x807FFFFF) | (100 + bits % 28) << 23;
  if ((bits & 0x7FFFFFFF) > 0x7F800000) bits = kCanonicalNan;
  return __builtin_bit_cast(float, bits);
}

using Plane = std::vector<uint8_t>;

struct Planes {
  Plane weight, residual, exp_avg, exp_avg_sq, scale, grad;
};

Plane floats(size_t count, bool positive = false) {
  Plane plane(count * 4);
  for (size_t i = 0; i < count; ++i) {
    const float value = random_float();
    const float stored = positive ? __builtin_fabsf(value) : value;
    std::memcpy(&plane[4 * i], &stored, 4);
  }
  return plane;
}

Plane halves(size_t count, bool positive = false) {
  const Plane wide = floats(count, positive);
  Plane plane(count * 2);
  for (size_t i = 0; i < count; ++i) std::memcpy(&plane[2 * i], &wide[4 * i + 2], 2);
  return plane;
}

Plane bytes(size_t count) {
  Plane plane(count);
  for (uint8_t& byte : plane) byte = static_cast<uint8_t>(random_bits());
  return plane;
}

int failures = 0;

void compare(const char* what, const Plane& ours, const Plane& expected) {
  if (ours == expected) return;
  size_t at = 0;
  while (ours[at] == expected[at]) ++at;
  std::printf("%s differs at byte %zu: %02x, not %02x\n", what, at, ours[at], expected[at]);
  ++failures;
}

void adam(const KernelTable& kernels, size_t format, size_t others, Planes& planes, const AdamCoefficients& c,
          size_t begin, size_t end) {
  const AdamPlanes raw{
      planes.weight.data(),
      planes.residual.data(),
      {planes.exp_avg.data(), planes.exp_avg_sq.data(), reinterpret_cast<float*>(planes.scale.data())},
      planes.grad.data()};
  kernels.adam[format][others](c, {0x1234567, 0x89ABCDEF, 0xFFFFFF00}, raw, begin, end);
}

Planes random_planes(size_t format, bool split, bool wide_grad) {
  Planes planes;
  planes.weight = split ? halves(kCount) : floats(kCount);
  planes.residual = bytes(kCount * (format == 2 ? 1 : 2));
  planes.exp_avg = format == 0 ? floats(kCount) : format == 1 ? halves(kCount) : bytes(kCount);
  planes.exp_avg_sq = format == 0 ? floats(kCount, true) : format == 1 ? halves(kCount, true) : bytes(kCount);
  planes.scale = floats(2 * (kCount / kStateBlock + 1), true);
  planes.grad = wide_grad ? floats(kCount) : halves(kCount);
  return planes;
}

void compare_adam(size_t format, size_t others, bool split, bool wide_grad) {
  for (int round = 0; round < 24; ++round) {
    wild = round < 8;
    const AdamCoefficients c{
        .grad_scale = 0.5F,
        .keep = 0.999F,
        .decay_into_grad = round % 2 ? 0.01F : 0.0F,
        .lerp_weight = round % 4 < 2 ? 0.1F : -0.4F,
        .lerp_from_grad = round % 4 >= 2,
        .beta2 = 0.999F,
        .one_minus_beta2 = 0.001F,
        .bias2_sqrt = 0.1F,
        .eps = 1e-8F,
        .step_size = 1e-3F,
    };
    Planes ours = random_planes(format, split, wide_grad);
    Planes expected = ours;
    const size_t begin = format == 2 ? kStateBlock : 3, end = kCount - static_cast<size_t>(round);
    adam(vector_kernels, format, others, ours, c, begin, end);
    adam(kScalarKernels, format, others, expected, c, begin, end);
    const std::string name = "adam " + std::to_string(format) + "/" + std::to_string(others) + " ";
    compare((name + "weight").c_str(), ours.weight, expected.weight);
    compare((name + "residual").c_str(), ours.residual, expected.residual);
    compare((name + "exp_avg").c_str(), ours.exp_avg, expected.exp_avg);
    compare((name + "exp_avg_sq").c_str(), ours.exp_avg_sq, expected.exp_avg_sq);
    compare((name + "scale").c_str(), ours.scale, expected.scale);
  }
}

void compare_moments(size_t format) {
  wild = false;
  const Plane m = floats(kCount), v = floats(kCount, true);
  Planes planes[2];
  Plane decoded[2];
  const KernelTable* tables[2] = {&vector_kernels, &kScalarKernels};
  for (int side = 0; side < 2; ++side) {
    Planes& p = planes[side];
    p.exp_avg.resize(kCount * 2);
    p.exp_avg_sq.resize(kCount * 2);
    p.scale.resize(8 * (kCount / kStateBlock + 1));
    decoded[side].resize(kCount * 8);
    const MomentPlanes raw{p.exp_avg.data(), p.exp_avg_sq.data(), reinterpret_cast<float*>(p.scale.data())};
    tables[side]->encode_moments[format](reinterpret_cast<const float*>(m.data()),
                                         reinterpret_cast<const float*>(v.data()), raw, 0, kCount);
    auto* values = reinterpret_cast<float*>(decoded[side].data());
    tables[side]->decode_moments[format](raw, values, values + kCount, 0, kCount);
  }
  compare("encoded exp_avg", planes[0].exp_avg, planes[1].exp_avg);
  compare("encoded exp_avg_sq", planes[0].exp_avg_sq, planes[1].exp_avg_sq);
  compare("scale", planes[0].scale, planes[1].scale);
  compare("decoded moments", decoded[0], decoded[1]);
}

template <class Residual>
void compare_master(const char* name, const MasterKernels<Residual>& ours,
                    const MasterKernels<Residual>& scalar) {
  wild = true;
  const Plane master = floats(kCount), fresh = halves(kCount);
  Plane weight[2], residual[2], joined[2];
  const MasterKernels<Residual>* tables[2] = {&ours, &scalar};
  for (int side = 0; side < 2; ++side) {
    weight[side].resize(kCount * 2);
    residual[side].resize(kCount * sizeof(Residual));
    joined[side].resize(kCount * 4);
    auto* w = reinterpret_cast<Bf16*>(weight[side].data());
    auto* r = reinterpret_cast<Residual*>(residual[side].data());
    tables[side]->split(reinterpret_cast<const float*>(master.data()), w, r, kCount);
    tables[side]->join(w, r, reinterpret_cast<float*>(joined[side].data()), kCount);
    std::memcpy(w, fresh.data(), kCount);  // half of them
    tables[side]->assign(w, r, reinterpret_cast<const Bf16*>(fresh.data()), kCount);
  }
  compare((std::string(name) + " weight").c_str(), weight[0], weight[1]);
  compare((std::string(name) + " residual").c_str(), residual[0], residual[1]);
  compare((std::string(name) + " master").c_str(), joined[0], joined[1]);
}

void compare_sums() {
  const Plane wide = floats(kSquareBlock), narrow = halves(kSquareBlock);
  for (size_t count : {size_t{0}, size_t{1}, size_t{15}, size_t{16}, size_t{1000}, kSquareBlock}) {
    const auto* fp32 = reinterpret_cast<const float*>(wide.data());
    const auto* bf16 = reinterpret_cast<const Bf16*>(narrow.data());
    const double ours[2] = {vector_kernels.square_sum_fp32(fp32, count),
                            vector_kernels.square_sum_bf16(bf16, count)};
    const double expected[2] = {kScalarKernels.square_sum_fp32(fp32, count),
                                kScalarKernels.square_sum_bf16(bf16, count)};
    for (int i = 0; i < 2; ++i) {
      const bool both_nan = ours[i] != ours[i] && expected[i] != expected[i];
      if (!both_nan && std::memcmp(&ours[i], &expected[i], sizeof(double)) != 0) {
        std::printf("sum of %zu squares differs: %a, not %a\n", count, ours[i], expected[i]);
        ++failures;
      }
    }
  }
}

}  // namespace

int main() {
  const IeeeDefaults ieee_defaults;
  for (size_t format = 0; format < kStateFormatCount; ++format) {
    compare_adam(format, static_cast<size_t>(AdamFormat::kBf16WeightBf16Grad), true, false);
    compare_adam(format, static_cast<size_t>(AdamFormat::kBf16WeightFp32Grad), true, true);
    if (format != 2) compare_adam(format, static_cast<size_t>(AdamFormat::kFp32WeightFp32Grad), false, true);
    if (format != 0) compare_moments(format);
  }
  compare_master("16-bit", vector_kernels.master16, kScalarKernels.master16);
  compare_master("8-bit", vector_kernels.master8, kScalarKernels.master8);
  compare_sums();
  std::printf("%d differences\n", failures);
  return failures ? 1 : 0;
}

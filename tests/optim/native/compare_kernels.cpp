// Runs the kernels of a vector instruction set and the scalar ones on the same bytes, and tells where they
// differ. Needs no Python, so that it runs under an emulator of another processor.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "optim/fp_environment.h"
#include "optim/kernel_table.h"
#include "optim/rule_table.h"

using namespace offload::optim;

namespace {

#if defined(__aarch64__)
const KernelTable& vector_kernels = kNeonKernels;
const RuleTable& vector_rules = kNeonRules;
#else
const KernelTable& vector_kernels = kAvx2Kernels;
const RuleTable& vector_rules = kAvx2Rules;
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

void compare(const std::string& what, const Plane& ours, const Plane& expected) {
  for (size_t at = 0; at < ours.size(); ++at) {
    if (ours[at] == expected[at]) continue;
    std::printf("%s differs at byte %zu: %02x, not %02x\n", what.c_str(), at, ours[at], expected[at]);
    ++failures;
    return;
  }
}

// Which bits a NaN has that arithmetic makes depends on how the compiler arranges it.
void make_nans_canonical(Plane& plane) {
  for (size_t at = 0; at + 4 <= plane.size(); at += 4) {
    float value;
    std::memcpy(&value, &plane[at], 4);
    if (value != value) std::memcpy(&plane[at], &kCanonicalNan, 4);
  }
}

AdamPlanes raw(Planes& planes) {
  return {planes.weight.data(),
          planes.residual.data(),
          {planes.exp_avg.data(), planes.exp_avg_sq.data(), reinterpret_cast<float*>(planes.scale.data())},
          planes.grad.data()};
}

Planes random_planes(StateFormat state, PlaneFormat others) {
  const bool split = others < PlaneFormat::kFp32WeightFp16Grad;
  const bool wide_grad =
      others == PlaneFormat::kBf16WeightFp32Grad || others == PlaneFormat::kFp32WeightFp32Grad;
  const auto moments = [&](bool positive) {
    if (state == StateFormat::kInt8) return bytes(kCount);
    return state == StateFormat::kBf16 ? halves(kCount, positive) : floats(kCount, positive);
  };
  Planes planes;
  planes.weight = split ? halves(kCount) : floats(kCount);
  planes.residual = bytes(kCount * (state == StateFormat::kInt8 ? 1 : 2));
  planes.exp_avg = moments(false);
  planes.exp_avg_sq = moments(true);
  planes.scale = floats(2 * (kCount / kStateBlock + 1), true);
  planes.grad = wide_grad ? floats(kCount) : halves(kCount);
  return planes;
}

// Runs step(planes, use_vectors) on equal planes.
template <class Step>
void compare_step(const std::string& name, StateFormat state, PlaneFormat others, const Step& step) {
  Planes ours = random_planes(state, others);
  Planes expected = ours;
  step(raw(ours), true);
  step(raw(expected), false);
  for (Planes* planes : {&ours, &expected}) {
    if (planes->weight.size() == 4 * kCount) make_nans_canonical(planes->weight);
    if (state == StateFormat::kFp32) make_nans_canonical(planes->exp_avg);
    if (state == StateFormat::kFp32) make_nans_canonical(planes->exp_avg_sq);
  }
  compare(name + " weight", ours.weight, expected.weight);
  compare(name + " residual", ours.residual, expected.residual);
  compare(name + " exp_avg", ours.exp_avg, expected.exp_avg);
  compare(name + " exp_avg_sq", ours.exp_avg_sq, expected.exp_avg_sq);
  compare(name + " scale", ours.scale, expected.scale);
}

constexpr NoiseKeys kKeys{0x1234567, 0x89ABCDEF, 0xFFFFFF00};

void compare_adam(StateFormat state, PlaneFormat others) {
  const auto row = static_cast<size_t>(state), column = static_cast<size_t>(others);
  if (kScalarKernels.adam[row][column] == nullptr) return;
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
    const size_t begin = state == StateFormat::kInt8 ? kStateBlock : 3;
    const size_t end = kCount - static_cast<size_t>(round);
    const std::string name = "adam " + std::to_string(row) + "/" + std::to_string(column);
    compare_step(name, state, others, [&](const AdamPlanes& planes, bool use_vectors) {
      const KernelTable& kernels = use_vectors ? vector_kernels : kScalarKernels;
      kernels.adam[row][column](c, kKeys, planes, begin, end);
    });
  }
}

void compare_rule(size_t rule, StateFormat state, PlaneFormat others) {
  for (int round = 0; round < 24; ++round) {
    wild = round < 8;
    const RuleCoefficients c{
        .grad_scale = 0.5F,
        .rate = 1e-2F,
        .decay_into_grad = round % 2 ? 0.01F : 0.0F,
        .keep = 0.99F,
        .mix_old = 0.9F,
        .mix_new = 0.1F,
        .old = 0.95F,
        .fresh = 0.05F,
        .eps = 1e-8F,
        .initial = 0.5F,
        .is_first = round % 4 >= 2,
        .nesterov = round % 8 >= 4,
    };
    const auto column = static_cast<size_t>(others);
    const std::string name = "rule " + std::to_string(rule) + "/" + std::to_string(column);
    compare_step(name, state, others, [&](const AdamPlanes& planes, bool use_vectors) {
      const RuleTable& rules = use_vectors ? vector_rules : kScalarRules;
      const auto& formats = state == StateFormat::kBf16 ? rules.bf16[rule] : rules.fp32[rule];
      formats.of[column](c, kKeys, planes, 3, kCount - static_cast<size_t>(round));
    });
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
    const MomentPlanes stored = raw(p).moments;
    tables[side]->encode_moments[format](reinterpret_cast<const float*>(m.data()),
                                         reinterpret_cast<const float*>(v.data()), stored, 0, kCount);
    auto* values = reinterpret_cast<float*>(decoded[side].data());
    tables[side]->decode_moments[format](stored, values, values + kCount, 0, kCount);
  }
  compare("encoded exp_avg", planes[0].exp_avg, planes[1].exp_avg);
  compare("encoded exp_avg_sq", planes[0].exp_avg_sq, planes[1].exp_avg_sq);
  compare("scale", planes[0].scale, planes[1].scale);
  compare("decoded moments", decoded[0], decoded[1]);
}

template <class Residual>
void compare_master(const std::string& name, const MasterKernels<Residual>& ours,
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
  compare(name + " weight", weight[0], weight[1]);
  compare(name + " residual", residual[0], residual[1]);
  compare(name + " master", joined[0], joined[1]);
}

template <class Element>
void compare_sum(const char* name, double (*ours)(const Element*, size_t),
                 double (*scalar)(const Element*, size_t), const Plane& values) {
  for (const size_t count : {size_t{0}, size_t{1}, size_t{15}, size_t{16}, size_t{1000}, kSquareBlock}) {
    const auto* elements = reinterpret_cast<const Element*>(values.data());
    const double sum = ours(elements, count), expected = scalar(elements, count);
    const bool both_nan = sum != sum && expected != expected;
    if (!both_nan && std::memcmp(&sum, &expected, sizeof(double)) != 0) {
      std::printf("sum of %zu squares of %s differs: %a, not %a\n", count, name, sum, expected);
      ++failures;
    }
  }
}

void compare_sums() {
  for (const bool with_special : {false, true}) {
    wild = with_special;
    const Plane wide = floats(kSquareBlock), narrow = halves(kSquareBlock);
    compare_sum("fp32", vector_kernels.square_sum_fp32, kScalarKernels.square_sum_fp32, wide);
    compare_sum("bf16", vector_kernels.square_sum_bf16, kScalarKernels.square_sum_bf16, narrow);
    compare_sum("fp16", vector_kernels.square_sum_fp16, kScalarKernels.square_sum_fp16, narrow);
  }
}

}  // namespace

int main() {
  const IeeeDefaults ieee_defaults;
  for (const StateFormat state : {StateFormat::kFp32, StateFormat::kBf16, StateFormat::kInt8}) {
    for (size_t column = 0; column < kPlaneFormatCount; ++column) {
      const auto others = static_cast<PlaneFormat>(column);
      compare_adam(state, others);
      if (state == StateFormat::kInt8) continue;
      for (size_t rule = 0; rule < kRuleCount; ++rule) compare_rule(rule, state, others);
    }
    if (state != StateFormat::kFp32) compare_moments(static_cast<size_t>(state));
  }
  compare_master("16-bit", vector_kernels.master16, kScalarKernels.master16);
  compare_master("8-bit", vector_kernels.master8, kScalarKernels.master8);
  compare_sums();
  std::printf("%d differences\n", failures);
  return failures ? 1 : 0;
}

#include "util/crc32c.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "util/thread_pool.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace offload {

namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // reflected

// An instruction takes three cycles and one may begin every cycle: so many blocks at a time hide that.
constexpr size_t kLanes = 3;
constexpr size_t kBlocksPerTask = 4 * kLanes;

using Lanes = std::array<uint32_t, kLanes>;
// Takes `size` bytes of each lane into its sum.
using Advance = void (*)(Lanes& sums, const std::array<const std::byte*, kLanes>& lanes, size_t size);

uint64_t word_at(const std::byte* from) noexcept {
  uint64_t word = 0;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

// tables[k][b]: the sum of byte b followed by k zero bytes.
constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t sum = byte;
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ ((sum & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = sum;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 255];
    }
  }
  return tables;
}();

uint32_t by_table(uint32_t sum, const std::byte* at, size_t size) noexcept {
  if constexpr (std::endian::native == std::endian::little) {
    for (; size >= 8; size -= 8, at += 8) {
      const uint64_t word = word_at(at) ^ sum;
      sum = 0;
      for (size_t k = 0; k < 8; ++k) sum ^= kTables[7 - k][(word >> (8 * k)) & 255];
    }
  }
  for (; size > 0; --size, ++at) sum = (sum >> 8) ^ kTables[0][(sum ^ static_cast<uint32_t>(*at)) & 255];
  return sum;
}

void advance_by_table(Lanes& sums, const std::array<const std::byte*, kLanes>& lanes, size_t size) {
  for (size_t lane = 0; lane < kLanes; ++lane) sums[lane] = by_table(sums[lane], lanes[lane], size);
}

#if defined(__x86_64__)

__attribute__((target("sse4.2"))) void advance_by_sse42(Lanes& sums,
                                                        const std::array<const std::byte*, kLanes>& lanes,
                                                        size_t size) {
  std::array<uint64_t, kLanes> wide = {sums[0], sums[1], sums[2]};
  size_t at = 0;
  for (; at + 8 <= size; at += 8) {
    for (size_t lane = 0; lane < kLanes; ++lane)
      wide[lane] = _mm_crc32_u64(wide[lane], word_at(lanes[lane] + at));
  }
  for (size_t lane = 0; lane < kLanes; ++lane) {
    sums[lane] = by_table(static_cast<uint32_t>(wide[lane]), lanes[lane] + at, size - at);
  }
}

#elif defined(__aarch64__) && defined(__linux__)

__attribute__((target("+crc"))) void advance_by_armv8(Lanes& sums,
                                                      const std::array<const std::byte*, kLanes>& lanes,
                                                      size_t size) {
  size_t at = 0;
  for (; at + 8 <= size; at += 8) {
    for (size_t lane = 0; lane < kLanes; ++lane)
      sums[lane] = __crc32cd(sums[lane], word_at(lanes[lane] + at));
  }
  for (size_t lane = 0; lane < kLanes; ++lane) {
    sums[lane] = by_table(sums[lane], lanes[lane] + at, size - at);
  }
}

#endif

struct Way {
  std::string_view name;
  Advance advance;
  bool (*supported)();
};

constexpr Way kWays[] = {
#if defined(__x86_64__)
    {"sse4.2", advance_by_sse42, [] { return __builtin_cpu_supports("sse4.2") != 0; }},
#elif defined(__aarch64__) && defined(__linux__)
    {"armv8", advance_by_armv8, [] { return (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }},
#endif
    {"table", advance_by_table, [] { return true; }},
};

Advance advance_of(std::string_view name) {
  for (const Way& way : kWays) {
    if (way.name == name && way.supported()) return way.advance;
  }
  throw std::invalid_argument("crc32c by '" + std::string(name) + "' does not work here");
}

// Blocks [first, last) of the call, kLanes at a time, as far as they are of one length; then what is left of
// each.
void run(Advance advance, const std::byte* data, std::span<const uint64_t> cuts, uint32_t* sums, size_t first,
         size_t last) {
  for (size_t block = first; block < last; block += kLanes) {
    const size_t count = std::min(kLanes, last - block);
    Lanes lane_sums;
    lane_sums.fill(~uint32_t{0});
    std::array<const std::byte*, kLanes> lanes{};
    size_t common = SIZE_MAX;
    for (size_t lane = 0; lane < kLanes; ++lane) {  // a lane too many computes what the last one does
      const size_t index = block + std::min(lane, count - 1);
      lanes[lane] = data + cuts[index];
      common = std::min<size_t>(common, cuts[index + 1] - cuts[index]);
    }
    advance(lane_sums, lanes, common);
    for (size_t lane = 0; lane < count; ++lane) {
      const size_t left = cuts[block + lane + 1] - cuts[block + lane] - common;
      Lanes alone;
      alone.fill(lane_sums[lane]);
      std::array<const std::byte*, kLanes> rest;
      rest.fill(lanes[lane] + common);
      if (left > 0) advance(alone, rest, left);
      sums[block + lane] = ~alone[0];
    }
  }
}

}  // namespace

std::vector<std::string_view> crc32c_ways() {
  std::vector<std::string_view> names;
  for (const Way& way : kWays) {
    if (way.supported()) names.push_back(way.name);
  }
  return names;
}

void crc32c(const std::byte* data, std::span<const uint64_t> cuts, uint32_t* sums, unsigned threads,
            std::string_view way) {
  const Advance advance = advance_of(way);
  const size_t blocks = cuts.empty() ? 0 : cuts.size() - 1;
  const size_t tasks = (blocks + kBlocksPerTask - 1) / kBlocksPerTask;
  ThreadPool::shared().run(tasks, threads, [&](size_t task) noexcept {
    const size_t first = task * kBlocksPerTask;
    run(advance, data, cuts, sums, first, std::min(first + kBlocksPerTask, blocks));
  });
}

}  // namespace offload

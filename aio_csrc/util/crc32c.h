// CRC-32C (Castagnoli), the checksum of iSCSI, ext4 and btrfs: the one that processors compute themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace offload {

// Ways to compute it that work on this machine, fastest first. The last is "table", and works everywhere.
[[nodiscard]] std::vector<std::string_view> crc32c_ways();

// sums[i] = crc32c of bytes [cuts[i], cuts[i + 1]), on at most `threads` threads. The same sums whatever the
// way and the threads. There is one cut more than sums. Throws std::invalid_argument for a way that does not
// work here.
void crc32c(const std::byte* data, std::span<const uint64_t> cuts, uint32_t* sums, unsigned threads,
            std::string_view way);

}  // namespace offload

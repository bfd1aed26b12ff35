#include "io/uring_memory.h"

#include <linux/io_uring.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "io/uring_ring.h"

#ifndef IORING_RSRC_REGISTER_SPARSE
#define IORING_RSRC_REGISTER_SPARSE (1U << 0)
#endif

namespace offload {

namespace {

constexpr uint32_t kEntriesMax = 1024;
constexpr size_t kEntryBytesMax = size_t{1} << 30;  // the kernel's limit for one entry

int update(UringRing& ring, uint32_t index, std::span<std::byte> part) noexcept {
  iovec memory = {part.data(), part.size()};
  io_uring_rsrc_update2 order{};
  order.offset = index;
  order.data = reinterpret_cast<uint64_t>(&memory);
  order.nr = 1;
  return ring.register_with(IORING_REGISTER_BUFFERS_UPDATE, &order, sizeof(order));
}

int make_table(UringRing& ring) noexcept {
  io_uring_rsrc_register order{};
  order.nr = kEntriesMax;
  order.flags = IORING_RSRC_REGISTER_SPARSE;
  const int error = ring.register_with(IORING_REGISTER_BUFFERS2, &order, sizeof(order));
  return error == EINVAL ? ENOTSUP : error;
}

}  // namespace

int UringMemory::add(UringRing& ring, std::span<std::byte> region) {
  if (index_of(region.data(), region.size()) >= 0) return 0;
  if (!has_table_) {
    if (const int error = make_table(ring)) return error;
    has_table_ = true;
    for (uint32_t index = kEntriesMax; index-- > 0;) free_.push_back(index);
  }
  for (size_t begin = 0; begin < region.size(); begin += kEntryBytesMax) {
    const auto part = region.subspan(begin, std::min(kEntryBytesMax, region.size() - begin));
    if (const int error = add_entry(ring, part)) {
      remove(ring, region);  // all or nothing
      return error;
    }
  }
  return 0;
}

int UringMemory::add_entry(UringRing& ring, std::span<std::byte> part) {
  if (free_.empty()) return ENOSPC;
  if (const int error = update(ring, free_.back(), part)) return error;
  const Entry entry = {part.data(), part.data() + part.size(), free_.back()};
  free_.pop_back();
  const auto after = std::upper_bound(entries_.begin(), entries_.end(), entry.begin,
                                      [](const std::byte* begin, const Entry& e) { return begin < e.begin; });
  entries_.insert(after, entry);
  return 0;
}

// Requests in flight keep what they use: the kernel unpins it after them.
void UringMemory::remove(UringRing& ring, std::span<std::byte> region) noexcept {
  std::erase_if(entries_, [&](const Entry& entry) {
    if (entry.begin < region.data() || entry.end > region.data() + region.size()) return false;
    if (update(ring, entry.index, {}) == 0) free_.push_back(entry.index);
    return true;
  });
}

void UringMemory::clear(UringRing& ring) noexcept {
  if (has_table_) [[maybe_unused]]
    const int error = ring.register_with(IORING_UNREGISTER_BUFFERS, nullptr, 0);
  has_table_ = false;
  entries_.clear();
  free_.clear();
}

int UringMemory::index_of(const std::byte* buffer, uint64_t size) const noexcept {
  const auto after = std::upper_bound(entries_.begin(), entries_.end(), buffer,
                                      [](const std::byte* begin, const Entry& e) { return begin < e.begin; });
  if (after == entries_.begin()) return -1;
  const Entry& entry = *std::prev(after);
  return buffer + size <= entry.end ? static_cast<int>(entry.index) : -1;
}

}  // namespace offload

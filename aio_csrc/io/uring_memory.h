#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace offload {

class UringRing;

// Note [Registered memory]
// For each transfer the kernel looks up and pins the pages of its buffer, which for large requests is most of
// the work that a transfer costs. Registered memory is pinned once; requests that lie in it name it and skip
// all that. A slab is registered as a whole, and every slot in it profits.
//
// The price: the pages count against RLIMIT_MEMLOCK (unless the process has CAP_IPC_LOCK), cannot be moved or
// swapped, and fork() copies pinned private pages at once instead of when they are written. Hence nothing is
// registered unless somebody asks for it. A child has the copies and not the ring, so it harms nobody.
//
// The kernel pins pages, not addresses: memory that is unmapped while registered would leave the ring writing
// to pages that nobody sees. Hence whoever registers keeps the mapping alive until it is removed.

// The table of registered memory of one ring.
class UringMemory {
 public:
  // 0 or an errno: ENOMEM over the limit, ENOTSUP before Linux 5.19, ENOSPC where the table is full.
  [[nodiscard]] int add(UringRing& ring, std::span<std::byte> region);
  void remove(UringRing& ring, std::span<std::byte> region) noexcept;

  void clear(UringRing& ring) noexcept;

  // The place in the table of the memory that the buffer lies in; -1 where it lies in none.
  [[nodiscard]] int index_of(const std::byte* buffer, uint64_t size) const noexcept;

 private:
  struct Entry {  // a region, or a part of one
    std::byte* begin;
    std::byte* end;
    uint32_t index;
  };

  [[nodiscard]] int add_entry(UringRing& ring, std::span<std::byte> part);

  bool has_table_ = false;
  std::vector<uint32_t> free_;
  std::vector<Entry> entries_;  // by address
};

}  // namespace offload

// The memory that an engine has registered with its ring: spans, cut into regions of the size that
// a ring takes. Finds the region in which a request lies. Threads: one, the ring's. Ownership:
// borrows the ring and the memory. Errors: texts, since transfers work with unregistered memory,
// too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "strata/io/request_ring.h"

namespace strata::io {

class RegisteredRegions {
 public:
  explicit RegisteredRegions(RequestRing& ring);

  // Empty, or why it is not registered.
  std::string add(std::span<std::byte> memory);
  // Unregisters memory that add() has registered.
  void remove(std::span<std::byte> memory);
  // The region that holds all of it; -1: none does.
  int find(const std::byte* memory, std::size_t bytes) const;

 private:
  struct Region {
    std::uintptr_t end;
    int number;
  };
  bool overlaps(std::span<const std::byte> memory) const;

  RequestRing& ring_;
  std::vector<int> free_;
  std::map<std::uintptr_t, Region> by_begin_;
};

}  // namespace strata::io

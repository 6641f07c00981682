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

  // Returns the reason why the memory is not registered; empty: it is.
  std::string add(std::span<std::byte> memory);
  // Unregisters memory that add() has registered.
  void remove(std::span<std::byte> memory);
  // The region that holds all of these bytes; -1: there is none.
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

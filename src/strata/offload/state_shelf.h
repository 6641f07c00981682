// States of a user's optimizer that rest on a drive between updates: arrays of bytes on the host
// are put away in a StateStore and brought back, part by part. Threads: one at a time. Ownership:
// borrows the store; the blocks are the store's. Errors: those of the store; UsageError for an
// array of another size than its block.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "strata/offload/state_store.h"

namespace strata::offload {

class StateShelf {
 public:
  explicit StateShelf(StateStore& store) : store_(store) {}

  // A block of zeroes on the drive.
  BlockId add(std::string name, Bytes bytes);
  void put(BlockId block, std::span<const std::byte> values);
  void bring(BlockId block, std::span<std::byte> values);

 private:
  template <typename Copy>
  void for_each_part(BlockId block, std::size_t bytes, Access access, Copy&& copy);

  StateStore& store_;
};

}  // namespace strata::offload

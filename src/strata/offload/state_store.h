// Seam: where optimizer state (master weights, exp_avg, exp_avg_sq) rests between steps, whatever
// its tier. The optimizer asks for a block, works on it through a lease and gives it back.
// Implementations: memory_store (device or host memory).
//
// Threads: one thread at a time. Ownership: a Lease borrows memory of the store until it is
// destroyed; a block is leased at most once at a time.
// Errors: OutOfMemoryError, IoError from fetch(); what was added stays as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "strata/base/units.h"
#include "strata/memory/ledger.h"

namespace strata::offload {

using BlockId = std::int32_t;

enum class Access { kRead, kReadWrite };

struct BlockSpec {
  std::string name;
  Bytes bytes;
  memory::Kind kind;
};

// Borrowed memory of one block. Giving it back (destroying it) after kReadWrite keeps what was
// written.
class Lease {
 public:
  virtual ~Lease() = default;
  virtual std::span<std::byte> bytes() = 0;  // aligned to 64 bytes at least
};

class StateStore {
 public:
  virtual ~StateStore() = default;
  virtual memory::Tier tier() const = 0;
  // Declares blocks of zeroes. Space is taken now, so that a store that is too small fails here,
  // and has none of them then. Blocks that come together cost one allocation a kind.
  virtual std::vector<BlockId> add_all(std::vector<BlockSpec> blocks) = 0;
  BlockId add(std::string name, Bytes bytes, memory::Kind kind) {
    return add_all({{std::move(name), bytes, kind}}).front();
  }
  virtual Bytes size_of(BlockId block) const = 0;
  virtual std::unique_ptr<Lease> fetch(BlockId block, Access access) = 0;
};

}  // namespace strata::offload

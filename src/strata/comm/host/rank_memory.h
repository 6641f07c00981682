// How the ranks of one host reach each other's memory: the one thing in which ranks that are
// threads and ranks that are processes differ. PullCollectives does the rest. Threads: used by one
// thread of its rank at a time. Errors: CommError where peers' memory cannot be reached,
// OutOfMemoryError from allocate().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "strata/comm/collectives.h"
#include "strata/comm/host/control_block.h"

namespace strata::comm {

// Bytes of some rank's buffer; they stay mapped while keep_alive lives, even if the buffer is
// freed.
struct BufferView {
  std::shared_ptr<const void> keep_alive;
  std::span<const std::byte> bytes;
};

class RankMemory {
 public:
  virtual ~RankMemory() = default;
  virtual std::string_view name() const = 0;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // Lives as long as this object.
  virtual ControlBlock& control(int rank) = 0;
  virtual std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) = 0;
  // The living buffer whose name has this id_of(); nothing where the rank has none (yet).
  virtual std::optional<BufferView> find(int rank, std::uint64_t buffer_id) = 0;
  // "process 123 has ended", or empty while the rank lives.
  virtual std::string why_gone(int rank) = 0;
};

}  // namespace strata::comm

// Ranks of one host reach each other's memory through their devices by three means: pieces of
// memory that travel as file descriptors, mappings of such pieces in another process, and flags in
// host memory that streams write and wait for. Threads: a PeerMapping is used by one thread at a
// time; a Flag is atomic. Ownership: a mapping keeps the memory alive, even when its owner has
// freed it or has ended. Errors: DeviceError.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "strata/base/file_descriptor.h"
#include "strata/base/units.h"

namespace strata::device {

// A part of one rank's shared memory: `bytes` of the file, from `offset` on.
struct SharedHandle {
  FileDescriptor descriptor;
  Bytes offset;
  Bytes bytes;
};

// A peer's shared memory in this process, to read and to write: its pieces, one behind the other.
class PeerMapping {
 public:
  virtual ~PeerMapping() = default;
  virtual const std::byte* base() const = 0;
  virtual Bytes mapped() const = 0;
  virtual std::size_t pieces() const = 0;
  virtual void add(SharedHandle piece) = 0;
};

// Keeps host memory registered with the driver.
class HostRegistration {
 public:
  virtual ~HostRegistration() = default;
};

// A count that only grows, but for its wrapping around.
using Flag = std::atomic<std::uint32_t>;
static_assert(sizeof(Flag) == sizeof(std::uint32_t) && Flag::is_always_lock_free);

inline bool reached(std::uint32_t flag, std::uint32_t value) {
  return static_cast<std::int32_t>(flag - value) >= 0;
}

}  // namespace strata::device

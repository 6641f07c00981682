// The checksum of bytes that come in parts, as checksum_of() says it of all of them at once: so
// that a block larger than any buffer can be checked. Threads: one. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace strata::format {

class RunningChecksum {
 public:
  RunningChecksum();
  ~RunningChecksum();
  RunningChecksum(const RunningChecksum&) = delete;
  RunningChecksum& operator=(const RunningChecksum&) = delete;

  void restart();
  void add(std::span<const std::byte> bytes);
  // The checksum of the bytes added since the last restart().
  std::uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace strata::format

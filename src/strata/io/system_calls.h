// The two system calls that move bytes, behind an interface, so that tests can inject rare results
// of a kernel: short transfers, EINTR, EIO, ENOSPC. Threads: several threads call it at once.
// Errors: returned, never thrown.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "strata/base/units.h"

namespace strata::io {

class SystemCalls {
 public:
  virtual ~SystemCalls() = default;
  // As pread(2) and pwrite(2): they return the bytes moved, or -errno.
  virtual std::int64_t read_at(int fd, std::span<std::byte> target, Bytes offset) = 0;
  virtual std::int64_t write_at(int fd, std::span<const std::byte> source, Bytes offset) = 0;
};

// The kernel's own.
class KernelCalls final : public SystemCalls {
 public:
  std::int64_t read_at(int fd, std::span<std::byte> target, Bytes offset) override;
  std::int64_t write_at(int fd, std::span<const std::byte> source, Bytes offset) override;
};

}  // namespace strata::io

#include "strata/io/system_calls.h"

#include <unistd.h>

#include <cerrno>

namespace strata::io {

std::int64_t KernelCalls::read_at(int fd, std::span<std::byte> target, Bytes offset) {
  const ssize_t moved = ::pread(fd, target.data(), target.size(), offset.value);
  return moved >= 0 ? moved : -errno;
}

std::int64_t KernelCalls::write_at(int fd, std::span<const std::byte> source, Bytes offset) {
  const ssize_t moved = ::pwrite(fd, source.data(), source.size(), offset.value);
  return moved >= 0 ? moved : -errno;
}

}  // namespace strata::io

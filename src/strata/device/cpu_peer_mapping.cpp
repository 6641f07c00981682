#include "strata/device/cpu_peer_mapping.h"

#include <fmt/core.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "strata/base/errno_text.h"
#include "strata/base/error.h"
#include "strata/memory/host_buffer.h"

namespace strata::device {

CpuPeerMapping::CpuPeerMapping(Bytes bytes) {
  const Bytes size = align_up(std::max(bytes, Bytes(1)), memory::page_size());
  void* address =
      ::mmap(nullptr, size.size(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    throw DeviceError(fmt::format("no room for {} of a peer's memory in the address space: {}",
                                  to_string(size), errno_text(errno)));
  }
  range_ = {static_cast<std::byte*>(address), size.size()};
}

CpuPeerMapping::~CpuPeerMapping() {
  ::munmap(range_.data(), range_.size());
}

void CpuPeerMapping::add(SharedHandle piece) {
  STRATA_ASSERT((mapped_ + piece.bytes).size() <= range_.size());
  void* const at = range_.data() + mapped_.size();
  if (::mmap(at, piece.bytes.size(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
             piece.descriptor.get(), piece.offset.value) == MAP_FAILED) {
    throw DeviceError(fmt::format("a peer's memory cannot be mapped ({}): {}",
                                  to_string(piece.bytes), errno_text(errno)));
  }
  mapped_ += piece.bytes;
  ++pieces_;
}

}  // namespace strata::device

#include "strata/device/cpu_shared_memory.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "strata/base/error.h"
#include "strata/memory/host_buffer.h"

namespace strata::device {

CpuGrowableMemory::CpuGrowableMemory(Bytes bytes, memory::Kind kind,
                                     std::shared_ptr<memory::Ledger> ledger,
                                     std::shared_ptr<memory::ByteBudget> budget, Pages pages)
    : ledger_(std::move(ledger)),
      budget_(std::move(budget)),
      kind_(kind),
      reserved_(align_up(bytes, memory::page_size())),
      charge_(ledger_, memory::Tier::kDevice, kind_, Bytes()) {
  STRATA_ASSERT(bytes.value >= 0);
  if (reserved_ == Bytes()) return;
  if (pages == Pages::kShared) {
    file_ = FileDescriptor(::memfd_create("strata", MFD_CLOEXEC));
    if (!file_.valid() || ::ftruncate(file_.get(), reserved_.value) != 0)
      throw_out_of_memory(reserved_, errno_text(errno));
  }
  const int flags = file_.valid() ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* address =
      ::mmap(nullptr, reserved_.size(), PROT_NONE, flags | MAP_NORESERVE, file_.get(), 0);
  if (address == MAP_FAILED) throw_out_of_memory(reserved_, errno_text(errno));
  base_ = static_cast<std::byte*>(address);
  // Advice: where huge pages are off, small ones serve.
  ::madvise(base_, reserved_.size(), MADV_HUGEPAGE);
}

CpuGrowableMemory::~CpuGrowableMemory() {
  if (base_ != nullptr) ::munmap(base_, reserved_.size());
}

void CpuGrowableMemory::grow_to(Bytes bytes) {
  STRATA_ASSERT(bytes.value >= 0);
  if (bytes <= backed_) return;
  if (bytes > reserved_) {
    throw UsageError(
        fmt::format("growable memory ({}) cannot grow beyond the range that was reserved: reserve "
                    "as much as it may "
                    "ever need; wanted {} B, reserved {} B",
                    memory::name_of(kind_), bytes.value, reserved_.value));
  }
  const Bytes target = align_up(bytes, memory::page_size());
  const Bytes growth = target - backed_;
  memory::ByteBudget::Hold hold;
  if (budget_) {
    auto taken = budget_->take(growth);
    if (!taken) throw_out_of_memory(growth, "beyond the device's budget");
    hold = std::move(*taken);
  }
  pieces_.reserve(pieces_.size() + 1);
  if (::mprotect(base_ + backed_.size(), growth.size(), PROT_READ | PROT_WRITE) != 0) {
    throw_out_of_memory(growth, errno_text(errno));
  }
  pieces_.push_back({backed_, growth, std::move(hold)});
  charge_.grow(growth);
  backed_ = target;
}

// Pages of a file go wherever they are mapped.
void CpuGrowableMemory::release() {
  if (backed_ == Bytes()) return;
  ::madvise(base_, backed_.size(), file_.valid() ? MADV_REMOVE : MADV_DONTNEED);
  ::mprotect(base_, backed_.size(), PROT_NONE);
  pieces_.clear();
  backed_ = Bytes();
  charge_ = memory::Charge(ledger_, memory::Tier::kDevice, kind_, Bytes());
}

SharedHandle CpuGrowableMemory::piece(std::size_t index) const {
  STRATA_ASSERT(file_.valid());
  const Piece& piece = pieces_.at(index);
  return {FileDescriptor(::fcntl(file_.get(), F_DUPFD_CLOEXEC, 0)), piece.offset, piece.bytes};
}

void CpuGrowableMemory::throw_out_of_memory(Bytes wanted, const std::string& reason) const {
  throw OutOfMemoryError(fmt::format(
      "device cpu has no memory to grow by ({}): {} wanted, {} backed, {} reserved ({}){}; free "
      "memory "
      "or use a smaller part of it; held: {}",
      memory::name_of(kind_), to_string(wanted), to_string(backed_), to_string(reserved_), reason,
      budget_ ? fmt::format("; budget {}, {} left", to_string(budget_->limit()),
                            to_string(budget_->left()))
              : std::string(),
      ledger_->report()));
}

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

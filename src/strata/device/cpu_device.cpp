#include "strata/device/cpu_device.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <utility>

#include "strata/memory/host_buffer.h"

namespace strata::device {
namespace {

// Nothing can be moved faster within the host by pinning it.
class CpuMemory final : public HostMemory {
 public:
  explicit CpuMemory(memory::HostBuffer buffer) : buffer_(std::move(buffer)) {}
  std::span<std::byte> bytes() override { return buffer_.bytes(); }
  bool pinned() const override { return true; }

 private:
  memory::HostBuffer buffer_;
};

// GrowableMemory of the CPU device: an address range reserved without access, of which a prefix is
// made readable and writable, page by page. The kernel backs pages with zeroes when they are first
// touched. Shared pages belong to an anonymous file, which peers map.
// Threads: one at a time. Ownership: frees range and charge on destruction.
// Units: the granule is the page; whole pages are charged.
// Errors: OutOfMemoryError when the system refuses, UsageError for growth beyond the range.
class CpuGrowableMemory final : public GrowableMemory {
 public:
  enum class Pages { kPrivate, kShared };

  CpuGrowableMemory(Bytes bytes, memory::Kind kind, std::shared_ptr<memory::Ledger> ledger,
                    Pages pages = Pages::kPrivate)
      : ledger_(std::move(ledger)),
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
  ~CpuGrowableMemory() override {
    if (base_ != nullptr) ::munmap(base_, reserved_.size());
  }

  std::byte* base() override { return base_; }
  Bytes reserved() const override { return reserved_; }
  Bytes backed() const override { return backed_; }
  void grow_to(Bytes bytes) override {
    STRATA_ASSERT(bytes.value >= 0);
    if (bytes <= backed_) return;
    if (bytes > reserved_)
      throw UsageError(
          "growable memory ({}) cannot grow beyond the range that was reserved: reserve as much as "
          "it may ever need; wanted {} B, reserved {} B",
          memory::name_of(kind_), bytes.value, reserved_.value);
    const Bytes target = align_up(bytes, memory::page_size());
    const Bytes growth = target - backed_;
    pieces_.reserve(pieces_.size() + 1);
    if (::mprotect(base_ + backed_.size(), growth.size(), PROT_READ | PROT_WRITE) != 0)
      throw_out_of_memory(growth, errno_text(errno));
    pieces_.push_back({backed_, growth});
    charge_.grow(growth);
    backed_ = target;
  }
  // Pages of a file go wherever they are mapped.
  void release() override {
    if (backed_ == Bytes()) return;
    ::madvise(base_, backed_.size(), file_.valid() ? MADV_REMOVE : MADV_DONTNEED);
    ::mprotect(base_, backed_.size(), PROT_NONE);
    pieces_.clear();
    backed_ = Bytes();
    charge_ = memory::Charge(ledger_, memory::Tier::kDevice, kind_, Bytes());
  }
  std::size_t pieces() const override { return pieces_.size(); }
  SharedHandle piece(std::size_t index) const override {
    STRATA_ASSERT(file_.valid());
    const Piece& piece = pieces_.at(index);
    return {FileDescriptor(::fcntl(file_.get(), F_DUPFD_CLOEXEC, 0)), piece.offset, piece.bytes};
  }

 private:
  struct Piece {
    Bytes offset;
    Bytes bytes;
  };
  [[noreturn]] void throw_out_of_memory(Bytes wanted, const std::string& reason) const {
    throw OutOfMemoryError(
        "device cpu has no memory to grow by ({}): {} wanted, {} backed, {} reserved ({}); free "
        "memory or use a smaller part of it; held: {}",
        memory::name_of(kind_), to_string(wanted), to_string(backed_), to_string(reserved_), reason,
        ledger_->report());
  }

  const std::shared_ptr<memory::Ledger> ledger_;
  const memory::Kind kind_;
  const Bytes reserved_;
  std::byte* base_ = nullptr;  // null when reserved_ is 0
  Bytes backed_;
  memory::Charge charge_;
  FileDescriptor file_;        // of shared pages
  std::vector<Piece> pieces_;  // one a growth
};

// A peer's shared memory on the CPU device: pages of its file, mapped one behind the other.
// Threads, ownership: device.h. Errors: DeviceError.
class CpuPeerMapping final : public PeerMapping {
 public:
  explicit CpuPeerMapping(Bytes bytes) {
    const Bytes size = align_up(std::max(bytes, Bytes(1)), memory::page_size());
    void* address =
        ::mmap(nullptr, size.size(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED)
      throw DeviceError("no room for {} of a peer's memory in the address space: {}",
                        to_string(size), errno_text(errno));
    range_ = {static_cast<std::byte*>(address), size.size()};
  }
  ~CpuPeerMapping() override { ::munmap(range_.data(), range_.size()); }

  const std::byte* base() const override { return range_.data(); }
  Bytes mapped() const override { return mapped_; }
  std::size_t pieces() const override { return pieces_; }
  void add(SharedHandle piece) override {
    STRATA_ASSERT((mapped_ + piece.bytes).size() <= range_.size());
    void* const at = range_.data() + mapped_.size();
    if (::mmap(at, piece.bytes.size(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
               piece.descriptor.get(), piece.offset.value) == MAP_FAILED) {
      throw DeviceError("a peer's memory cannot be mapped ({}): {}", to_string(piece.bytes),
                        errno_text(errno));
    }
    mapped_ += piece.bytes;
    ++pieces_;
  }

 private:
  std::span<std::byte> range_;  // reserved without access
  Bytes mapped_;
  std::size_t pieces_ = 0;
};

class CpuEvent final : public TimedEvent {
 public:
  bool done() override { return true; }
  void wait() override {}
  double seconds_since(TimedEvent& earlier) override {
    const auto* ours = dynamic_cast<const CpuEvent*>(&earlier);
    STRATA_ASSERT(ours != nullptr);
    return std::chrono::duration<double>(time_ - ours->time_).count();
  }

 private:
  std::chrono::steady_clock::time_point time_ = std::chrono::steady_clock::now();
};

class CpuStream final : public Stream {
 public:
  std::unique_ptr<Event> record() override { return std::make_unique<CpuEvent>(); }
  std::unique_ptr<TimedEvent> record_timed() override { return std::make_unique<CpuEvent>(); }
  void wait_for(Event& event) override { event.wait(); }
  void synchronize() override {}
};

}  // namespace

CpuDevice::CpuDevice(CpuDeviceOptions options)
    : ledger_(options.ledger ? std::move(options.ledger) : std::make_shared<memory::Ledger>()),
      waits_(options.waits ? std::move(options.waits) : std::make_shared<HostWaits>()),
      pool_(options.threads, std::move(options.cores)),
      compute_stream_(std::make_unique<CpuStream>()) {}

std::unique_ptr<Memory> CpuDevice::allocate(Bytes bytes, memory::Kind kind) {
  return std::make_unique<CpuMemory>(
      memory::HostBuffer(bytes, {.ledger = ledger_, .tier = memory::Tier::kDevice, .kind = kind}));
}

std::unique_ptr<Memory> CpuDevice::allocate_uncharged(Bytes bytes) {
  return std::make_unique<CpuMemory>(memory::HostBuffer(bytes));
}

std::unique_ptr<HostMemory> CpuDevice::allocate_host(Bytes bytes, memory::Kind kind) {
  return std::make_unique<CpuMemory>(memory::HostBuffer(bytes, {.ledger = ledger_, .kind = kind}));
}

std::unique_ptr<GrowableMemory> CpuDevice::reserve(Bytes bytes, memory::Kind kind) {
  return std::make_unique<CpuGrowableMemory>(bytes, kind, ledger_);
}

std::unique_ptr<GrowableMemory> CpuDevice::reserve_shared(Bytes bytes, memory::Kind kind) {
  return std::make_unique<CpuGrowableMemory>(bytes, kind, ledger_,
                                             CpuGrowableMemory::Pages::kShared);
}

std::unique_ptr<PeerMapping> CpuDevice::reserve_mapping(Bytes bytes) {
  return std::make_unique<CpuPeerMapping>(bytes);
}

Bytes CpuDevice::free_bytes() const {
  return memory::available_memory();
}

std::unique_ptr<Stream> CpuDevice::create_stream() {
  return std::make_unique<CpuStream>();
}

}  // namespace strata::device

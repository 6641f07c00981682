#include "strata/comm/host/shared_segment.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>

#include <cerrno>
#include <new>
#include <random>
#include <utility>

#include "strata/base/error.h"

namespace strata::comm {

std::optional<std::size_t> BufferDirectory::insert(std::uint64_t id, BufferRange place) {
  const std::size_t used = used_.load(std::memory_order_relaxed);
  std::size_t at = 0;
  while (at < used && slots_[at].id.load(std::memory_order_relaxed) != 0) ++at;
  if (at == kDirectorySlots) return std::nullopt;
  write(slots_[at], id, place);
  if (at == used) used_.store(used + 1, std::memory_order_release);
  changes_.fetch_add(1, std::memory_order_release);
  return at;
}

void BufferDirectory::erase(std::size_t slot) {
  write(slots_[slot], 0, {});
  changes_.fetch_add(1, std::memory_order_release);
}

// Release stores of the fields keep the odd version before them, and acquire loads of the fields
// keep the second look at the version behind them.
void BufferDirectory::write(Slot& slot, std::uint64_t id, BufferRange place) {
  const std::uint32_t version = slot.version.load(std::memory_order_relaxed);
  slot.version.store(version + 1, std::memory_order_relaxed);
  slot.id.store(id, std::memory_order_release);
  slot.offset.store(place.offset, std::memory_order_release);
  slot.bytes.store(place.bytes, std::memory_order_release);
  slot.version.store(version + 2, std::memory_order_release);
}

std::optional<BufferRange> BufferDirectory::find(std::uint64_t id) const {
  const std::size_t used = used_.load(std::memory_order_acquire);
  for (std::size_t at = 0; at < used; ++at) {
    const Slot& slot = slots_[at];
    if (slot.id.load(std::memory_order_relaxed) != id) continue;
    const std::uint32_t version = slot.version.load(std::memory_order_acquire);
    const std::uint64_t found = slot.id.load(std::memory_order_acquire);
    const BufferRange place{slot.offset.load(std::memory_order_acquire),
                            slot.bytes.load(std::memory_order_acquire)};
    const bool steady = version % 2 == 0 && slot.version.load(std::memory_order_relaxed) == version;
    if (steady && found == id) return place;
  }
  return std::nullopt;
}

namespace {

constexpr Bytes kSmallAlignment = 4_KiB;
constexpr Bytes kHugeAlignment = 2_MiB;  // lets the kernel use huge pages

Bytes alignment_of(Bytes bytes) {
  return bytes >= kHugeAlignment ? kHugeAlignment : kSmallAlignment;
}

FileDescriptor create_memfd(int rank) {
  FileDescriptor file(::memfd_create("strata", MFD_CLOEXEC));
  if (!file.valid()) {
    throw CommError(fmt::format("rank {} cannot create shared memory (memfd_create: {})", rank,
                                errno_text(errno)));
  }
  return file;
}

void grow(int fd, Bytes bytes, const std::string& name) {
  if (::ftruncate(fd, bytes.value) != 0) {
    throw OutOfMemoryError(
        fmt::format("cannot grow the shared memory for '{}': check the limits of the process "
                    "(ulimit -f) and the "
                    "memory that is free (segment of {}; {})",
                    name, to_string(bytes), errno_text(errno)));
  }
}

std::uint64_t random_key() {
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32) | device();
}

}  // namespace

class SegmentBuffer final : public SharedBuffer {
 public:
  SegmentBuffer(std::shared_ptr<SharedSegment> segment, std::string name,
                std::shared_ptr<const memory::MappedMemory> memory)
      : segment_(std::move(segment)), name_(std::move(name)), memory_(std::move(memory)) {}
  ~SegmentBuffer() override { segment_->free(id_of(name_)); }

  std::span<std::byte> local() override { return memory_->bytes(); }
  const std::string& name() const override { return name_; }
  bool releasable() const override { return true; }
  void release() override { segment_->take_pages(id_of(name_)); }

 private:
  std::shared_ptr<SharedSegment> segment_;
  std::string name_;
  std::shared_ptr<const memory::MappedMemory> memory_;
};

SharedSegment::SharedSegment(int rank)
    : rank_(rank),
      file_(create_memfd(rank)),
      end_(align_up(Bytes(sizeof(SegmentHeader)), kHugeAlignment)) {
  grow(fd(), end_, "control block");
  header_memory_ =
      memory::MappedMemory::of_file(fd(), Bytes(0), Bytes(sizeof(SegmentHeader)),
                                    memory::MappedMemory::Access::kReadWrite, "the control block");
  // New pages are zero, which is the initial state of every member; writing only the key keeps the
  // unused part of the directory without pages.
  header_ = std::launder(reinterpret_cast<SegmentHeader*>(header_memory_.bytes().data()));
  header_->key = random_key();
}

std::unique_ptr<SharedBuffer> SharedSegment::allocate(std::string name, Bytes bytes) {
  const std::uint64_t id = id_of(name);
  const std::lock_guard lock(mutex_);
  if (living_.contains(id)) {
    throw UsageError(fmt::format(
        "a living buffer of this rank has the name already: free it first ('{}', rank {})", name,
        rank_));
  }
  const BufferRange place{align_up(end_, alignment_of(bytes)).value, bytes.value};
  grow(fd(), Bytes(place.offset) + align_up(bytes, kSmallAlignment) + kSmallAlignment, name);
  end_ = Bytes(place.offset) + align_up(bytes, kSmallAlignment) + kSmallAlignment;
  auto memory = std::make_shared<const memory::MappedMemory>(memory::MappedMemory::of_file(
      fd(), Bytes(place.offset), bytes, memory::MappedMemory::Access::kReadWrite, name));
  const auto slot = header_->directory.insert(id, place);
  if (!slot) {
    throw UsageError(
        fmt::format("too many shared buffers: put several things into one ('{}' would be "
                    "number {})",
                    name, kDirectorySlots + 1));
  }
  living_.emplace(id, Living{*slot, place, memory});
  return std::make_unique<SegmentBuffer>(shared_from_this(), std::move(name), std::move(memory));
}

std::optional<BufferView> SharedSegment::find(std::uint64_t id) const {
  const std::lock_guard lock(mutex_);
  const auto found = living_.find(id);
  if (found == living_.end()) return std::nullopt;
  return BufferView{found->second.memory, found->second.memory->bytes()};
}

void SharedSegment::free(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = living_.find(id);
  if (found == living_.end()) return;
  punch(found->second.place);
  header_->directory.erase(found->second.slot);
  living_.erase(found);
}

void SharedSegment::take_pages(std::uint64_t id) const {
  const std::lock_guard lock(mutex_);
  punch(living_.at(id).place);
}

// Even while peers have them mapped.
void SharedSegment::punch(const BufferRange& place) const {
  if (place.bytes == 0) return;
  ::fallocate(fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, place.offset,
              align_up(Bytes(place.bytes), kSmallAlignment).value);
}

}  // namespace strata::comm

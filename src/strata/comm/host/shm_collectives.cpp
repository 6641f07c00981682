#include <fcntl.h>
#include <fmt/core.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>

#include <cerrno>
#include <cstdint>
#include <fstream>
#include <memory>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/file_descriptor.h"
#include "strata/comm/agreement.h"
#include "strata/comm/host/host_collectives.h"
#include "strata/comm/host/rank_link.h"
#include "strata/memory/host_buffer.h"

namespace strata::comm {
namespace {

constexpr Bytes kSmallAlignment = 4_KiB;
constexpr Bytes kHugeAlignment = 2_MiB;  // lets the kernel use huge pages

FileDescriptor create_memfd(int rank) {
  FileDescriptor file(::memfd_create("strata", MFD_CLOEXEC));
  if (!file.valid())
    throw CommError("rank {} cannot create shared memory (memfd_create: {})", rank,
                    errno_text(errno));
  return file;
}

void grow(int fd, Bytes bytes, const std::string& name) {
  if (::ftruncate(fd, bytes.value) != 0)
    throw OutOfMemoryError(
        "cannot grow the shared memory for '{}': check the limits of the process (ulimit -f) and "
        "the memory that is free (segment of {}; {})",
        name, to_string(bytes), errno_text(errno));
}

std::uint64_t random_key() {
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32) | device();
}

// The content of a segment at offset 0.
struct SegmentHeader {
  std::uint64_t key = 0;  // random: proves that a peer opened the right file
  ControlBlock control;
  BufferDirectory directory;
};

// The memory that one process shares with the other ranks of its host: one memfd that holds the
// control block, the directory of buffers and, behind them, the buffers. It has no name in any file
// system: peers open it through /proc, and the kernel frees it with the last process that maps it,
// however that process ends.
// Buffers get fresh offsets of the (sparse) file; freeing one gives its pages back at once.
// Threads: one thread of the rank at a time; a buffer may go in any. Errors: OutOfMemoryError,
// UsageError.
class SharedSegment : public std::enable_shared_from_this<SharedSegment> {
 public:
  explicit SharedSegment(int rank)
      : rank_(rank),
        file_(create_memfd(rank)),
        end_(align_up(Bytes(sizeof(SegmentHeader)), kHugeAlignment)) {
    grow(fd(), end_, "control block");
    header_memory_ = memory::MappedMemory::of_file(fd(), Bytes(0), Bytes(sizeof(SegmentHeader)),
                                                   memory::MappedMemory::Access::kReadWrite,
                                                   "the control block");
    // New pages are zero, which is the initial state of every member; writing only the key keeps
    // the unused part of the directory without pages.
    header_ = std::launder(reinterpret_cast<SegmentHeader*>(header_memory_.bytes().data()));
    header_->key = random_key();
  }

  int fd() const { return file_.get(); }
  SegmentHeader& header() const { return *header_; }
  std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) {
    const std::uint64_t id = id_of(name);
    const std::lock_guard lock(mutex_);
    if (living_.contains(id))
      throw UsageError(
          "a living buffer of this rank has the name already: free it first ('{}', rank {})", name,
          rank_);
    const Bytes alignment = bytes >= kHugeAlignment ? kHugeAlignment : kSmallAlignment;
    const BufferRange place{align_up(end_, alignment).value, bytes.value};
    grow(fd(), Bytes(place.offset) + align_up(bytes, kSmallAlignment) + kSmallAlignment, name);
    end_ = Bytes(place.offset) + align_up(bytes, kSmallAlignment) + kSmallAlignment;
    auto memory = std::make_shared<const memory::MappedMemory>(memory::MappedMemory::of_file(
        fd(), Bytes(place.offset), bytes, memory::MappedMemory::Access::kReadWrite, name));
    const auto slot = header_->directory.insert(id, place);
    if (!slot)
      throw UsageError(
          "too many shared buffers: put several things into one ('{}' would be number {})", name,
          kDirectorySlots + 1);
    living_.emplace(id, Living{*slot, place, memory});
    return std::make_unique<Buffer>(shared_from_this(), std::move(name), std::move(memory));
  }
  std::optional<BufferView> find(std::uint64_t id) const {
    const std::lock_guard lock(mutex_);
    const auto found = living_.find(id);
    if (found == living_.end()) return std::nullopt;
    return BufferView{found->second.memory, found->second.memory->bytes()};
  }

 private:
  class Buffer final : public SharedBuffer {
   public:
    Buffer(std::shared_ptr<SharedSegment> segment, std::string name,
           std::shared_ptr<const memory::MappedMemory> memory)
        : SharedBuffer(std::move(name)), segment_(std::move(segment)), memory_(std::move(memory)) {}
    ~Buffer() override { segment_->free(id_of(name())); }

    std::span<std::byte> local() override { return memory_->bytes(); }
    bool releasable() const override { return true; }
    void release() override { segment_->take_pages(id_of(name())); }

   private:
    std::shared_ptr<SharedSegment> segment_;
    std::shared_ptr<const memory::MappedMemory> memory_;
  };
  struct Living {
    std::size_t slot;
    BufferRange place;
    std::shared_ptr<const memory::MappedMemory> memory;
  };

  void free(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    const auto found = living_.find(id);
    if (found == living_.end()) return;
    punch(found->second.place);
    header_->directory.erase(found->second.slot);
    living_.erase(found);
  }
  void take_pages(std::uint64_t id) const {
    const std::lock_guard lock(mutex_);
    punch(living_.at(id).place);
  }
  // Even while peers have them mapped.
  void punch(const BufferRange& place) const {
    if (place.bytes == 0) return;
    ::fallocate(fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, place.offset,
                align_up(Bytes(place.bytes), kSmallAlignment).value);
  }

  int rank_;
  FileDescriptor file_;
  memory::MappedMemory header_memory_;
  SegmentHeader* header_ = nullptr;
  // Buffers may go in another thread than the rank's, with the last view of their memory.
  mutable std::mutex mutex_;  // guards what follows, and changes of the directory
  Bytes end_;                 // of the file: where the next buffer goes
  std::unordered_map<std::uint64_t, Living> living_;
};

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

FileDescriptor open_process(int rank, pid_t pid) {
  FileDescriptor process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!process.valid())
    throw CommError(
        "cannot watch the process of rank {}: it has ended, or it is in another PID namespace "
        "(process {}; pidfd_open: {})",
        rank, pid, errno_text(errno));
  return process;
}

// The address of a process's segment, for other processes.
struct SegmentAddress {
  std::string host;  // the kernel's boot id
  pid_t pid = 0;
  int fd = -1;
  std::uint64_t key = 0;

  static SegmentAddress of(const SharedSegment& segment) {
    return {boot_id(), ::getpid(), segment.fd(), segment.header().key};
  }
  std::string to_text() const { return nlohmann::json(*this).dump(); }
  static SegmentAddress from_text(const std::string& text) {
    try {
      return nlohmann::json::parse(text).get<SegmentAddress>();
    } catch (const nlohmann::json::exception&) {
      throw CommError(
          "every rank must build the same kind of collectives: this is not an address of shared "
          "memory ('{}')",
          text);
    }
  }
  NLOHMANN_DEFINE_TYPE_INTRUSIVE(SegmentAddress, host, pid, fd, key)
};

FileDescriptor open_segment(int rank, const SegmentAddress& address) {
  const std::string path = fmt::format("/proc/{}/fd/{}", address.pid, address.fd);
  FileDescriptor segment(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!segment.valid())
    throw CommError(
        "cannot open the shared memory of rank {}: run all ranks of this host as one user in one "
        "container, or use the gloo backend ({}: {})",
        rank, path, errno_text(errno));
  struct stat status {};
  if (::fstat(segment.get(), &status) != 0 ||
      status.st_size < static_cast<off_t>(sizeof(SegmentHeader))) {
    throw CommError(
        "what rank {} announced is not its shared memory: the ranks are probably in different PID "
        "namespaces; run them in one container, or use the gloo backend ({})",
        rank, path);
  }
  return segment;
}

// Another rank's process: its segment, which this rank maps piece by piece as it reads it, and
// whether the process still lives. Threads: one thread of this rank at a time. Errors: CommError
// when it cannot be reached.
class RankProcess {
 public:
  RankProcess(int rank, const SegmentAddress& address) : rank_(rank), pid_(address.pid) {
    if (address.host != boot_id())
      throw CommError(
          "shared memory serves ranks of one host, but rank {} is on another one: use the gloo "
          "backend",
          rank);
    process_ = open_process(rank, pid_);
    segment_ = open_segment(rank, address);
    header_memory_ = memory::MappedMemory::of_file(
        segment_.get(), Bytes(0), Bytes(sizeof(SegmentHeader)),
        memory::MappedMemory::Access::kReadWrite, "a peer's control block");
    header_ = std::launder(reinterpret_cast<SegmentHeader*>(header_memory_.bytes().data()));
    if (header_->key != address.key)
      throw CommError(
          "what rank {} announced is not its shared memory: the ranks are probably in different "
          "PID namespaces; run them in one container, or use the gloo backend (process {}, "
          "descriptor {})",
          rank, pid_, address.fd);
  }

  ControlBlock& control() { return header_->control; }
  std::optional<BufferView> find(std::uint64_t id) {
    const std::uint64_t changes = header_->directory.changes();
    if (std::exchange(seen_changes_, changes) != changes) {  // drops stale mappings
      std::erase_if(mappings_, [&](const auto& item) {
        return header_->directory.find(item.first) != item.second.place;
      });
    }
    auto known = mappings_.find(id);
    if (known == mappings_.end()) {
      const auto place = header_->directory.find(id);
      if (!place) return std::nullopt;
      auto memory = std::make_shared<const memory::MappedMemory>(memory::MappedMemory::of_file(
          segment_.get(), Bytes(place->offset), Bytes(place->bytes),
          memory::MappedMemory::Access::kRead, fmt::format("a buffer of rank {}", rank_)));
      known = mappings_.emplace(id, Mapping{*place, std::move(memory)}).first;
    }
    return BufferView{known->second.memory, known->second.memory->bytes()};
  }
  std::string why_gone() const {
    pollfd request{process_.get(), POLLIN, 0};
    const bool ended = ::poll(&request, 1, 0) == 1;
    return ended ? fmt::format("process {} has ended", pid_) : std::string();
  }

 private:
  struct Mapping {
    BufferRange place;
    std::shared_ptr<const memory::MappedMemory> memory;
  };

  int rank_;
  pid_t pid_;
  FileDescriptor process_;  // readable when it has ended
  FileDescriptor segment_;
  memory::MappedMemory header_memory_;
  SegmentHeader* header_ = nullptr;
  std::uint64_t seen_changes_ = 0;
  std::unordered_map<std::uint64_t, Mapping> mappings_;  // by id
};

class ShmRankMemory final : public RankMemory {
 public:
  ShmRankMemory(int rank, std::shared_ptr<SharedSegment> segment,
                const std::vector<std::string>& addresses, RankNames names)
      : rank_(rank), segment_(std::move(segment)) {
    for (std::size_t r = 0; r < addresses.size(); ++r) {
      const int peer = static_cast<int>(r);
      peers_.push_back(peer == rank ? nullptr
                                    : std::make_unique<RankProcess>(
                                          names.of(peer), SegmentAddress::from_text(addresses[r])));
    }
  }

  std::string_view name() const override { return "shm"; }
  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(peers_.size()); }

  ControlBlock& control(int rank) override {
    return rank == rank_ ? segment_->header().control : peer(rank).control();
  }

  std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) override {
    return segment_->allocate(std::move(name), bytes);
  }

  std::optional<BufferView> find(int rank, std::uint64_t buffer_id) override {
    return rank == rank_ ? segment_->find(buffer_id) : peer(rank).find(buffer_id);
  }

  std::string why_gone(int rank) override {
    return rank == rank_ ? std::string() : peer(rank).why_gone();
  }

 private:
  RankProcess& peer(int rank) { return *peers_[static_cast<std::size_t>(rank)]; }

  int rank_;
  std::shared_ptr<SharedSegment> segment_;
  std::vector<std::unique_ptr<RankProcess>> peers_;  // null at my own place
};

}  // namespace

std::unique_ptr<Collectives> make_shm_collectives(Bootstrap& bootstrap,
                                                  const CommOptions& options) {
  std::unique_ptr<ShmRankMemory> memory;
  std::shared_ptr<SharedSegment> segment;
  std::string address;
  // A rank that fails takes part in the exchanges all the same, so that every rank gets the error.
  std::string error = error_of([&] {
    segment = std::make_shared<SharedSegment>(bootstrap.rank());
    address = SegmentAddress::of(*segment).to_text();
  });
  const std::vector<std::string> addresses = bootstrap.exchange(address);
  if (error.empty()) {
    error = error_of([&] {
      memory = std::make_unique<ShmRankMemory>(bootstrap.rank(), std::move(segment), addresses,
                                               options.names);
    });
  }
  agree_all_can(bootstrap.exchange(error), "join through shared memory", options.names);
  return make_pull_collectives(std::move(memory), options);
}

}  // namespace strata::comm

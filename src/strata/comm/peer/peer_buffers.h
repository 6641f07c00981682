// One rank's shared memory by name, and what it has mapped of its peers'.
// Threads: allocate(), find() and the buffers' own calls in the rank's thread; share() in the
// channel's; the others in any. Ownership: buffers may outlive this object; mappings go with it, or
// when a peer has freed the buffer. Errors: UsageError for names in use; DeviceError,
// OutOfMemoryError.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/peer/peer_channel.h"
#include "strata/comm/peer/peer_signals.h"
#include "strata/device/device.h"

namespace strata::comm {

inline constexpr Bytes kAll(std::numeric_limits<std::int64_t>::max());
inline constexpr std::size_t kNoPieces = std::numeric_limits<std::size_t>::max();

// Between two looks at buffers that grow: about what a piece of memory takes to make.
inline constexpr std::chrono::milliseconds kLookAgain(2);
// Between two looks for freed buffers: each asks for all that is mapped.
inline constexpr std::chrono::milliseconds kLookForFreedAgain(50);

class PeerBuffers {
 public:
  PeerBuffers(std::shared_ptr<device::Device> device, int rank)
      : device_(std::move(device)), rank_(rank) {}

  // `action` runs before a buffer's memory is freed: it waits for the ranks that read it.
  void set_before_free(std::function<void()> action) { before_free_ = std::move(action); }
  // `action` runs before peers' memory is unmapped: it waits for this rank's own reads.
  void set_before_unmap(std::function<void()> action) { before_unmap_ = std::move(action); }
  void set_flags(PeerFlags flags) { flags_ = flags; }
  // The link ends: no peer maps a buffer any more, and the flags are gone. Buffers that live on are
  // memory of this rank alone.
  void end_sharing() {
    before_unmap_ = {};
    const std::lock_guard lock(mutex_);
    flags_.reset();
  }

  // `growing`: no memory at first.
  static std::unique_ptr<SharedBuffer> allocate(const std::shared_ptr<PeerBuffers>& buffers,
                                                std::string name, Bytes bytes, bool growing) {
    // The device is the collectives' own, so its ledger is never read, and the kind does not
    // matter.
    auto memory = buffers->device_->reserve_shared(bytes, memory::Kind::kWeights);
    if (!growing) memory->grow_to(bytes);
    return std::make_unique<Buffer>(buffers, std::move(name), bytes, std::move(memory));
  }

  // The parts that peers get; PeerChannel::Service::share(). Keys are "n" and a name, or "#" and a
  // number.
  std::optional<SharedParts> share(const std::string& key, std::size_t first) {
    if (key.empty()) return std::nullopt;
    const std::lock_guard lock(mutex_);
    const std::string rest = key.substr(1);
    if (key[0] == 'n') {
      const auto found = living_.find(rest);
      if (found == living_.end()) return std::nullopt;
      return found->second->parts(first);
    }
    for (const auto& [name, buffer] : living_) {
      if (std::to_string(buffer->number()) == rest) return buffer->parts(first);
    }
    return std::nullopt;
  }

  static std::string key_of_name(const std::string& name) { return fmt::format("n{}", name); }
  static std::string key_of_number(std::uint64_t number) { return fmt::format("#{}", number); }
  // The number of a buffer of this rank; nothing where it is not one of these.
  std::optional<std::uint64_t> number_of(const SharedBuffer& buffer) const {
    const std::lock_guard lock(mutex_);
    const auto found = living_.find(buffer.name());
    if (found == living_.end() || found->second != &buffer) return std::nullopt;
    return found->second->number();
  }

  struct View {
    const std::byte* base = nullptr;
    Bytes bytes;   // that the owner asked for
    Bytes mapped;  // a prefix
  };
  // A peer's buffer with at least `needed` bytes mapped, or all if the owner has fewer; absent if
  // there is no such buffer. First unmaps the buffers that note_freed() found.
  std::optional<View> find(PeerChannel& channel, int rank, const std::string& key, Bytes needed) {
    const std::lock_guard lock(mapping_mutex_);
    unmap_gone();
    return look(channel, Place(rank, key), needed, /*unmaps=*/true);
  }
  // The same beside the rank's work: maps all that there is, and unmaps nothing.
  std::optional<View> find_ahead(PeerChannel& channel, int rank, const std::string& key) {
    const std::lock_guard lock(mapping_mutex_);
    return look(channel, Place(rank, key), kAll, /*unmaps=*/false);
  }

  // Whether a buffer of this rank is there still.
  bool lives(std::uint64_t number) const {
    const std::lock_guard lock(mutex_);
    return std::ranges::any_of(living_,
                               [&](const auto& each) { return each.second->number() == number; });
  }
  // Whether a peer may have freed a mapped buffer. note_freed() asks it, and records what is gone.
  bool may_be_freed(int rank) const {
    const std::lock_guard lock(mapping_mutex_);
    const auto looked = looked_.find(rank);
    return flags_->freed(rank).load() != (looked == looked_.end() ? 0 : looked->second);
  }
  void note_freed(PeerChannel& channel, int rank) {
    const std::uint32_t freed = flags_->freed(rank).load();
    std::optional<Place> last;  // the lock is free between two questions, so that others may ask
    for (;;) {
      const std::lock_guard lock(mapping_mutex_);
      const auto next =
          last ? mappings_.upper_bound(*last) : mappings_.lower_bound(Place(rank, ""));
      if (next == mappings_.end() || next->first.first != rank) {
        looked_[rank] = freed;
        return;
      }
      last = next->first;
      const std::optional<SharedParts> parts = channel.ask(rank, last->second, kNoPieces);
      if (!parts || parts->number != next->second.number) next->second.gone = true;
    }
  }
  // Asks all peers, and unmaps what is gone.
  void unmap_freed(PeerChannel& channel, int world_size) {
    for (int rank = 0; rank < world_size; ++rank) {
      if (rank != rank_) note_freed(channel, rank);
    }
    const std::lock_guard lock(mapping_mutex_);
    unmap_gone();
  }

 private:
  class Buffer final : public SharedBuffer {
   public:
    Buffer(std::shared_ptr<PeerBuffers> owner, std::string name, Bytes bytes,
           std::unique_ptr<device::GrowableMemory> memory)
        : SharedBuffer(std::move(name)),
          owner_(std::move(owner)),
          bytes_(bytes),
          memory_(std::move(memory)) {
      const std::lock_guard lock(owner_->mutex_);
      number_ = owner_->next_number_++;
      if (!owner_->living_.emplace(SharedBuffer::name(), this).second) {
        throw UsageError("a buffer named '{}' exists already; names are unique",
                         SharedBuffer::name());
      }
    }

    ~Buffer() override {
      if (owner_->before_free_) owner_->before_free_();
      const std::lock_guard lock(owner_->mutex_);
      owner_->living_.erase(name());
      owner_->count_freed();
    }

    std::span<std::byte> local() override { return {memory_->base(), bytes_.size()}; }

    void back(Bytes bytes) override {
      const std::lock_guard lock(owner_->mutex_);
      memory_->grow_to(bytes);
    }

    bool releasable() const override { return true; }
    // To peers it is another buffer of this name from now on, whose pieces they map anew.
    void release() override {
      if (owner_->before_free_) owner_->before_free_();
      const std::lock_guard lock(owner_->mutex_);
      memory_->release();
      number_ = owner_->next_number_++;
      owner_->count_freed();
    }

    std::uint64_t number() const { return number_; }

    // The mutex is held.
    SharedParts parts(std::size_t first) const {
      SharedParts result{number_, bytes_, memory_->reserved(), {}};
      for (std::size_t i = first; i < memory_->pieces(); ++i)
        result.pieces.push_back(memory_->piece(i));
      return result;
    }

   private:
    std::shared_ptr<PeerBuffers> owner_;
    Bytes bytes_;
    std::unique_ptr<device::GrowableMemory> memory_;
    std::uint64_t number_ = 0;
  };
  struct Mapping {
    std::uint64_t number = 0;
    std::uint32_t freed = 0;  // the owner's count when it was asked
    Bytes bytes;
    std::unique_ptr<device::PeerMapping> pieces;
    bool gone = false;  // its owner has freed it
  };
  using Place = std::pair<int, std::string>;  // rank and key
  // mapping_mutex_ is held.
  std::optional<View> look(PeerChannel& channel, const Place& place, Bytes needed, bool unmaps) {
    const auto& [rank, key] = place;
    auto known = mappings_.find(place);
    const std::uint32_t freed = flags_->freed(rank).load();
    while (known == mappings_.end() || known->second.pieces->mapped() < needed ||
           known->second.freed != freed) {
      const bool is_new = known == mappings_.end();
      std::optional<SharedParts> parts =
          channel.ask(rank, key, is_new ? 0 : known->second.pieces->pieces());
      if (!is_new && (!parts || parts->number != known->second.number)) {
        known->second.gone = true;
        if (!unmaps) return std::nullopt;
        unmap_gone();
        known = mappings_.end();
        if (parts) continue;  // another buffer of that name: from its first piece on
      }
      if (!parts) return std::nullopt;
      if (is_new) {
        Mapping mapping{parts->number, freed, parts->bytes,
                        device_->reserve_mapping(parts->reserved)};
        known = mappings_.emplace(place, std::move(mapping)).first;
      }
      known->second.freed = freed;
      const bool more = !parts->pieces.empty();
      for (device::SharedHandle& piece : parts->pieces) known->second.pieces->add(std::move(piece));
      if (!more) break;
    }
    return View{known->second.pieces->base(), known->second.bytes, known->second.pieces->mapped()};
  }
  // After a failure peers free their buffers while this rank may still read them.
  void unmap_gone() {
    const auto gone = [](const auto& each) { return each.second.gone; };
    if (std::ranges::none_of(mappings_, gone)) return;
    if (before_unmap_) before_unmap_();
    std::erase_if(mappings_, gone);
  }

  std::shared_ptr<device::Device> device_;
  int rank_;
  std::optional<PeerFlags> flags_;  // absent: not shared yet, or no longer
  std::function<void()> before_free_;
  std::function<void()> before_unmap_;
  // mutex_ is held
  void count_freed() {
    if (flags_) flags_->freed(rank_).fetch_add(1);
  }
  mutable std::mutex mutex_;               // guards these two, and the end of flags_
  std::map<std::string, Buffer*> living_;  // by name
  std::uint64_t next_number_ = 1;
  // Guards the mappings, and one question to a peer at a time. Held while a peer answers, which the
  // channel's timeout bounds; the thread that answers peers never takes it.
  mutable std::mutex mapping_mutex_;
  std::map<Place, Mapping> mappings_;
  std::map<int, std::uint32_t> looked_;  // each owner's count of freed buffers at the last look
};

// Maps peers' memory beside the rank's own work, in a thread of its own: buffers that grow are
// mapped as their memory comes, so that the first gather finds them, and what peers have freed is
// recorded, to be unmapped before the next gather: a mapping keeps the memory.
// Threads: calls of the rank's. Ownership: borrows buffers and channel; stops its thread on
// destruction. Errors: none leave it. A mapping that fails here is tried again, and reported, by
// the first operation that needs it.
class PeerMapper {
 public:
  PeerMapper(PeerBuffers& buffers, PeerChannel& channel, int rank, int world_size)
      : buffers_(buffers), channel_(channel) {
    for (int turn = 1; turn < world_size; ++turn) peers_.push_back((rank + turn) % world_size);
    if (!peers_.empty()) thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  }
  ~PeerMapper() = default;

  // Maps the buffers that peers have under this name until they have all their memory, or this
  // rank's, of this number, is gone.
  void map_ahead(std::string name, std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    growing_.push_back({std::move(name), number});
    wanted_.notify_one();
  }
  // Peers may have freed some of what is mapped.
  void look_for_freed() {
    const std::lock_guard lock(mutex_);
    looks_ = true;
    wanted_.notify_one();
  }

 private:
  struct Buffer {
    std::string name;
    std::uint64_t number;
  };

  void run(const std::stop_token& stop) {
    std::chrono::steady_clock::time_point next_look;
    std::unique_lock lock(mutex_);
    while (wanted_.wait(lock, stop, [this] { return looks_ || !growing_.empty(); })) {
      const auto now = std::chrono::steady_clock::now();
      const bool looks = now >= next_look && std::exchange(looks_, false);
      if (looks) next_look = now + kLookForFreedAgain;
      std::vector<Buffer> growing = std::exchange(growing_, {});
      lock.unlock();
      if (looks) note_freed();
      std::erase_if(growing, [this](const Buffer& buffer) { return map(buffer); });
      lock.lock();
      growing_.insert(growing_.end(), growing.begin(), growing.end());
      wanted_.wait_for(lock, stop, kLookAgain, [] { return false; });
    }
  }
  // Whether there is nothing more to map.
  bool map(const Buffer& buffer) const {
    const std::string key = PeerBuffers::key_of_name(buffer.name);
    bool complete = true;
    try {
      if (!buffers_.lives(buffer.number)) return true;
      for (const int peer : peers_) {
        const auto view = buffers_.find_ahead(channel_, peer, key);
        complete = complete && view && view->mapped >= view->bytes;
      }
    } catch (const std::exception&) {
      return true;
    }
    return complete;
  }
  void note_freed() const {
    for (const int peer : peers_) {
      FirstError dropped;  // it has ended, or does not answer
      dropped.attempt([&] { buffers_.note_freed(channel_, peer); });
    }
  }

  PeerBuffers& buffers_;
  PeerChannel& channel_;
  std::vector<int> peers_;
  std::mutex mutex_;
  std::condition_variable_any wanted_;
  std::vector<Buffer> growing_;  // guarded by mutex_
  bool looks_ = false;           // guarded by mutex_
  std::jthread thread_;
};

}  // namespace strata::comm

// One rank's shared memory by name, and what it has mapped of its peers'.
// Threads: allocate(), find() and the buffers' own calls in the rank's thread; share() in the
// channel's; the others in any. Ownership: buffers may outlive this object; mappings go with it, or
// when a peer has freed the buffer. Errors: UsageError for names in use; DeviceError,
// OutOfMemoryError.
#pragma once

#include <fmt/core.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "strata/comm/peer/peer_channel.h"
#include "strata/comm/peer/peer_flags.h"
#include "strata/device/device.h"

namespace strata::comm {

class PeerBuffers {
 public:
  PeerBuffers(std::shared_ptr<device::Device> device, int rank);

  // `action` runs before a buffer's memory is freed: it waits for the ranks that read it.
  void set_before_free(std::function<void()> action) { before_free_ = std::move(action); }
  // `action` runs before peers' memory is unmapped: it waits for this rank's own reads.
  void set_before_unmap(std::function<void()> action) { before_unmap_ = std::move(action); }
  void set_flags(PeerFlags flags) { flags_ = flags; }
  // The link ends: no peer maps a buffer any more, and the flags are gone. Buffers that live on are
  // memory of this rank alone.
  void end_sharing();

  // `growing`: no memory at first.
  static std::unique_ptr<SharedBuffer> allocate(const std::shared_ptr<PeerBuffers>& buffers,
                                                std::string name, Bytes bytes, bool growing);

  // The parts that peers get; PeerChannel::Service::share(). Keys are "n" and a name, or "#" and a
  // number.
  std::optional<SharedParts> share(const std::string& key, std::size_t first);

  static std::string key_of_name(const std::string& name) { return fmt::format("n{}", name); }
  static std::string key_of_number(std::uint64_t number) { return fmt::format("#{}", number); }
  // The number of a buffer of this rank; nothing where it is not one of these.
  std::optional<std::uint64_t> number_of(const SharedBuffer& buffer) const;

  struct View {
    const std::byte* base = nullptr;
    Bytes bytes;   // that the owner asked for
    Bytes mapped;  // a prefix
  };
  // A peer's buffer with at least `needed` bytes mapped, or all if the owner has fewer; absent if
  // there is no such buffer. First unmaps the buffers that note_freed() found.
  std::optional<View> find(PeerChannel& channel, int rank, const std::string& key, Bytes needed);
  // The same beside the rank's work: maps all that there is, and unmaps nothing.
  std::optional<View> find_ahead(PeerChannel& channel, int rank, const std::string& key);

  // Whether a buffer of this rank is there still.
  bool lives(std::uint64_t number) const;
  // Whether a peer may have freed a mapped buffer. note_freed() asks it, and records what is gone.
  bool may_be_freed(int rank) const;
  void note_freed(PeerChannel& channel, int rank);
  // Asks all peers, and unmaps what is gone.
  void unmap_freed(PeerChannel& channel, int world_size);

 private:
  class Buffer;
  struct Mapping {
    std::uint64_t number = 0;
    std::uint32_t freed = 0;  // the owner's count when it was asked
    Bytes bytes;
    std::unique_ptr<device::PeerMapping> pieces;
    bool gone = false;  // its owner has freed it
  };
  using Place = std::pair<int, std::string>;  // rank and key
  // mapping_mutex_ is held.
  std::optional<View> look(PeerChannel& channel, const Place& place, Bytes needed, bool unmaps);
  void unmap_gone();

  std::shared_ptr<device::Device> device_;
  int rank_;
  std::optional<PeerFlags> flags_;  // absent: not shared yet, or no longer
  std::function<void()> before_free_;
  std::function<void()> before_unmap_;
  void count_freed();                      // mutex_ is held
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
  PeerMapper(PeerBuffers& buffers, PeerChannel& channel, int rank, int world_size);
  ~PeerMapper();

  // Maps the buffers that peers have under this name until they have all their memory, or this
  // rank's, of this number, is gone.
  void map_ahead(std::string name, std::uint64_t number);
  // Peers may have freed some of what is mapped.
  void look_for_freed();

 private:
  struct Buffer {
    std::string name;
    std::uint64_t number;
  };

  void run(const std::stop_token& stop);
  // Whether there is nothing more to map.
  bool map(const Buffer& buffer) const;
  void note_freed() const;

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

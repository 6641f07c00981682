// Maps peers' memory beside the rank's own work, in a thread of its own: buffers that grow are
// mapped as their memory comes, so that the first gather finds them, and what peers have freed is
// noted, to be unmapped before the next gather: a mapping keeps the memory.
// Threads: calls of the rank's. Ownership: borrows buffers and channel; stops its thread on
// destruction. Errors: none leave it. A mapping that fails here is tried again, and reported, by
// the first operation that needs it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "strata/comm/peer/peer_buffers.h"

namespace strata::comm {

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

// How the ranks of one host talk beside their operations: each rank has a thread that hands out
// descriptors of its shared memory to peers that ask, and hears at once when a peer fails or ends,
// whatever the rank's own thread is waiting for.
// A socket leads from every rank to every other; requests and news go along it, replies come back.
// Threads: ask() in one thread at a time; fail() in any; the Service is called in the channel's
// thread. Ownership: stops its thread on destruction. Units: bytes; timeout in milliseconds.
// Errors: CommError from construction and ask(), which name the rank.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "strata/base/file_descriptor.h"
#include "strata/comm/collectives.h"
#include "strata/comm/comm_options.h"
#include "strata/device/shared_memory.h"

namespace strata::comm {

// What a rank lets its peers know of one of its buffers.
struct SharedParts {
  std::uint64_t number = 0;  // of the buffer among all that the rank ever had
  Bytes bytes;               // asked for
  Bytes reserved;            // of address space, for all pieces to come
  std::vector<device::SharedPiece> pieces;
};

class PeerChannel {
 public:
  class Service {
   public:
    virtual ~Service() = default;
    // The pieces from `first` on, some of them at least, of the buffer with this key; nothing
    // where there is none (yet).
    virtual std::optional<SharedParts> share(const std::string& key, std::size_t first) = 0;
    // Rank `rank` failed or ended; called again and again from then on.
    virtual void peer_failed(int rank, const std::string& reason) noexcept = 0;
  };

  // Collective: meets the other ranks by way of `control`.
  PeerChannel(Collectives& control, Service& service, RankNames names);
  ~PeerChannel();
  PeerChannel(const PeerChannel&) = delete;
  PeerChannel& operator=(const PeerChannel&) = delete;

  // Where the rank has ended, its last words have come to the Service before this throws.
  std::optional<SharedParts> ask(int rank, const std::string& key, std::size_t first);
  // Tells the peers that this rank has failed. They answer it no more: a question on its way ends
  // in an error, as later ones do.
  void fail(std::string_view reason) noexcept;

 private:
  struct Peer {
    FileDescriptor socket;  // that it asks through
    int rank = -1;          // not known before its first message
    bool gone = false;
    std::string failure;  // empty: none
  };
  void connect_to_peers(const std::vector<std::string>& addresses);
  void serve();
  void accept_peer();
  void receive(Peer& peer);
  void reply(const Peer& peer, std::string_view request);
  void lost(Peer& peer, std::string reason);
  void note_ended();
  void wait_for_end_of(int rank);

  Service& service_;
  int rank_;
  RankNames names_;
  FileDescriptor listener_;
  FileDescriptor wake_;                  // an event that ends the thread
  std::vector<FileDescriptor> outward_;  // by rank; mine is empty
  std::vector<Peer> peers_;              // the thread's own
  std::atomic<bool> failed_ = false;     // fail() was called
  std::mutex mutex_;
  std::condition_variable heard_;
  std::set<int> ended_;  // guarded by mutex_: ranks that failed, left or ended
  std::thread thread_;
};

}  // namespace strata::comm

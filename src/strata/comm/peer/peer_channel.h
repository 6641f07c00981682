// How the ranks of one host talk beside their operations: each rank has a thread that hands out
// descriptors of its shared memory to peers that ask, and hears at once when a peer fails or ends,
// whatever the rank's own thread is waiting for.
// A socket leads from every rank to every other; requests and news go along it, replies come back.
// All of them exist when the constructor returns; no process can connect later. A connection that
// does not name its rank, such as one of another program of the same user, is closed.
// Threads: ask() in one thread at a time; fail() and stop_asking() in any; the Service is called in
// the channel's thread. Ownership: stops its thread on destruction. Units: bytes, milliseconds.
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
#include "strata/comm/peer/peer_flags.h"
#include "strata/comm/peer/peer_messages.h"

namespace strata::comm {

class PeerChannel {
 public:
  class Service {
   public:
    virtual ~Service() = default;
    // The pieces from `first` on, some of them at least, of the buffer with this key; nothing
    // where there is none (yet).
    virtual std::optional<SharedParts> share(const std::string& key, std::size_t first) = 0;
    // A peer failed or ended, or this rank hears its peers no more; `message` names the rank.
    // Called again and again from then on.
    virtual void failed(const std::string& message) noexcept = 0;
    // A peer that lives and lets this rank wait for too long; asked FlagWatch::kLooks times in a
    // timeout.
    virtual std::optional<LatePeer> late_peer() = 0;
  };

  // Collective: connects to the other ranks over `control`. `timeout`: the time that a living peer
  // may take to answer.
  PeerChannel(Collectives& control, Service& service, std::chrono::milliseconds timeout,
              RankNames names);
  ~PeerChannel();
  PeerChannel(const PeerChannel&) = delete;
  PeerChannel& operator=(const PeerChannel&) = delete;

  // Where the rank has ended, its last words have come to the Service before this throws. A rank
  // that did not answer within the timeout is not asked again: every later call throws at once.
  std::optional<SharedParts> ask(int rank, const std::string& key, std::size_t first);
  // Notifies the peers that this rank has failed, and how: they read "rank 1 <told>". They answer
  // it no more: a question on its way ends in an error, as later ones do.
  void fail(std::string_view told) noexcept;
  // Ends a question on its way in an error, and every later one.
  void stop_asking() noexcept;

 private:
  struct Peer {
    FileDescriptor socket;  // that it asks through
    int rank = 0;
    bool gone = false;
    std::string failure;  // its own words, or its fate; empty: none
  };
  void connect_to_peers(const std::vector<std::string>& addresses);
  void accept_peers(int listener);
  std::optional<int> new_peer(std::string_view hello) const;

  void serve() noexcept;
  // False: the channel goes. Throws where the system refuses to wait.
  bool serve_once();
  void receive(Peer& peer);
  void reply(const Peer& peer, const Question& question);
  void note_late();
  void note_ended();
  void repeat_until_stopped(const std::string& failure) noexcept;
  void wait_for_end_of(int rank);

  Service& service_;
  int rank_;
  std::chrono::milliseconds timeout_;
  RankNames names_;
  FileDescriptor wake_;                  // an event that ends the thread
  std::vector<FileDescriptor> outward_;  // by rank; mine is empty
  std::set<int> silent_;                 // ranks that did not answer in time; of the asking thread
  std::vector<Peer> peers_;              // the thread's own, like the next
  std::chrono::steady_clock::time_point next_look_;
  std::atomic<bool> asks_no_more_ = false;
  std::mutex mutex_;
  std::condition_variable heard_;
  std::set<int> ended_;    // guarded by mutex_: ranks that failed, left or ended
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace strata::comm

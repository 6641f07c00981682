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

#include <fmt/core.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <limits>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/file_descriptor.h"
#include "strata/base/interface.h"
#include "strata/comm/agreement.h"
#include "strata/comm/collectives.h"
#include "strata/comm/peer/peer_signals.h"

namespace strata::comm {

using Clock = std::chrono::steady_clock;

// The period at which a failure is reported again: late peers may still write flags of streams.
inline constexpr std::chrono::milliseconds kRemind(20);
// The system closes all sockets of a rank that ended; the bound is for a rank that only closed one.
inline constexpr std::chrono::seconds kLastWords(5);

// False: the time is over.
inline bool wait_until(Clock::time_point give_up, std::span<pollfd> waiting) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(give_up - Clock::now()).count();
    const int ready = ::poll(
        waiting.data(), waiting.size(),
        static_cast<int>(std::clamp<std::int64_t>(left, 0, std::numeric_limits<int>::max())));
    if (ready >= 0) return ready > 0;
    if (errno != EINTR) throw CommError("poll failed: {}", errno_text(errno));
  }
}

class PeerChannel : NonCopyable {
 public:
  class Service : public Interface {
   public:
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
              RankNames names)
      : service_(service), rank_(control.rank()), timeout_(timeout), names_(names) {
    FileDescriptor listener;
    std::string address;
    const auto all_can = [&](std::string_view what, const auto& step) {
      agree_all_can(control.all_gather_text(error_of(step)), what, names_);
    };
    all_can("listen to the others", [&] {
      wake_ = FileDescriptor(::eventfd(0, EFD_CLOEXEC));
      if (!wake_.valid()) throw CommError("the system has no event to give: {}", errno_text(errno));
      listener = listen_at_new_address(address);
    });
    const std::vector<std::string> addresses = control.all_gather_text(address);
    all_can("reach the others", [&] { connect_to_peers(addresses); });
    all_can("be reached by the others", [&] { accept_peers(listener.get()); });
    thread_ = std::thread([this] { serve(); });
  }
  ~PeerChannel() {
    for (const FileDescriptor& socket : outward_) {
      if (socket.valid()) send_message(socket.get(), kLeaveLine, {});
    }
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      heard_.notify_all();
    }
    const std::uint64_t one = 1;
    while (::write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
    thread_.join();
  }

  // Where the rank has ended, its last words have come to the Service before this throws. A rank
  // that did not answer within the timeout is not asked again: every later call throws at once.
  std::optional<SharedParts> ask(int rank, const std::string& key, std::size_t first) {
    const auto silent = [&] {
      return CommError(
          "rank {} lives but does not answer: it was asked for '{}', and the timeout of {} ms is "
          "over; look there for a process that is stopped or hangs",
          names_.of(rank), key, timeout_.count());
    };
    if (silent_.count(rank) != 0) throw silent();
    const int socket = outward_.at(static_cast<std::size_t>(rank)).get();
    const std::string question = fmt::format("{} {} {}", kQuestion, first, key);
    if (!asks_no_more_.load() && send_message(socket, question, {})) {
      pollfd waiting{socket, POLLIN, 0};
      if (!wait_until(Clock::now() + timeout_, {&waiting, 1})) {
        silent_.insert(rank);
        throw silent();
      }
      SocketMessage message = receive_message(socket);
      if (!message.text.empty()) {
        if (message.text == kNoBufferLine) return std::nullopt;
        if (std::optional<SharedParts> parts = parts_in(std::move(message))) return parts;
        throw CommError(
            "rank {} answers what this version does not know; all ranks must run the same version",
            names_.of(rank));
      }
    }
    if (asks_no_more_.load()) throw CommError("this rank has failed: no peer answers it");
    std::unique_lock lock(mutex_);  // the rank's answers and its words come on different sockets
    heard_.wait_for(lock, kLastWords, [&] { return ended_.count(rank) != 0; });
    throw CommError("rank {} has ended: it does not answer", names_.of(rank));
  }
  // Notifies the peers that this rank has failed, and how: they read "rank 1 <told>". They answer
  // it no more: a question on its way ends in an error, as later ones do.
  void fail(std::string_view told) noexcept {
    asks_no_more_.store(true);
    try {
      const std::string text = fmt::format("{} {}", kFailure, told.substr(0, kToldMax));
      for (const FileDescriptor& socket : outward_) {
        if (socket.valid()) send_message(socket.get(), text, {});
      }
    } catch (const std::exception&) {  // no memory for the words: peers see this rank end
      asks_no_more_.store(true);
    }
    stop_asking();
  }
  // Ends a question on its way in an error, and every later one.
  void stop_asking() noexcept {
    asks_no_more_.store(true);
    for (const FileDescriptor& socket : outward_) {
      if (socket.valid()) ::shutdown(socket.get(), SHUT_RD);
    }
  }

 private:
  struct Peer {
    FileDescriptor socket;  // that it asks through
    int rank = 0;
    bool gone = false;
    std::string failure;  // its own words, or its fate; empty: none
  };
  void connect_to_peers(const std::vector<std::string>& addresses) {
    outward_.resize(addresses.size());
    for (std::size_t r = 0; r < addresses.size(); ++r) {
      if (static_cast<int>(r) == rank_) continue;
      outward_[r] = connect_to(addresses[r]);
      send_message(outward_[r].get(), fmt::format("{} {}", kHello, rank_), {});
    }
  }
  // All peers have connected by now, and each says first which rank it is.
  void accept_peers(int listener) {
    const Clock::time_point give_up = Clock::now() + timeout_;
    std::vector<FileDescriptor> unknown;
    while (peers_.size() + 1 < outward_.size()) {
      std::vector<pollfd> waiting{{listener, POLLIN, 0}};
      for (const FileDescriptor& each : unknown) waiting.push_back({each.get(), POLLIN, 0});
      if (!wait_until(give_up, waiting)) {
        throw CommError("only {} of {} peers said who they are within {} ms", peers_.size(),
                        outward_.size() - 1, timeout_.count());
      }
      for (std::size_t i = unknown.size(); i > 0; --i) {
        if (waiting[i].revents == 0) continue;
        FileDescriptor socket = std::move(unknown[i - 1]);
        unknown.erase(unknown.begin() + static_cast<std::ptrdiff_t>(i - 1));
        const std::optional<int> rank = new_peer(receive_message(socket.get()).text);
        if (rank) peers_.push_back({std::move(socket), *rank, false, {}});
      }
      if (waiting[0].revents == 0) continue;
      FileDescriptor socket = accept_from(listener);
      if (socket.valid()) unknown.push_back(std::move(socket));
    }
  }
  // The peer that a connection's first line names; nothing where it is none, or has a connection.
  std::optional<int> new_peer(std::string_view hello) const {
    const std::optional<std::string_view> named = after_letter(kHello, hello);
    const std::optional<int> rank = named ? number_in<int>(*named) : std::nullopt;
    const bool expected =
        rank && *rank >= 0 && *rank < static_cast<int>(outward_.size()) && *rank != rank_;
    const auto known = [&](const Peer& peer) { return peer.rank == *rank; };
    return expected && std::ranges::none_of(peers_, known) ? rank : std::nullopt;
  }

  void serve() noexcept {
    std::string failure = "its thread failed";
    try {
      while (serve_once()) {
      }
      return;
    } catch (const std::exception& error) {
      failure = error.what();
    }
    repeat_until_stopped(failure);
  }
  // False: the channel goes. Throws where the system refuses to wait.
  bool serve_once() {
    std::vector<pollfd> waiting{{wake_.get(), POLLIN, 0}};
    bool failed = false;
    for (const Peer& peer : peers_) {
      waiting.push_back({peer.gone ? -1 : peer.socket.get(), POLLIN, 0});
      failed = failed || !peer.failure.empty();
    }
    wait_until(failed ? Clock::now() + kRemind : next_look_, waiting);
    if (waiting[0].revents != 0) return false;
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      if (waiting[i + 1].revents != 0) receive(peers_[i]);
    }
    note_late();
    for (const Peer& peer : peers_) {
      if (!peer.failure.empty())
        service_.failed(fmt::format("rank {} {}", names_.of(peer.rank), peer.failure));
    }
    note_ended();
    return true;
  }
  void receive(Peer& peer) {
    const SocketMessage message = receive_message(peer.socket.get());
    if (const std::optional<Question> question = question_in(message.text))
      return reply(peer, *question);
    peer.gone = true;
    if (message.text == kLeaveLine) return;
    if (message.text.empty()) {
      peer.failure = "failed: it has ended";
    } else {
      peer.failure = after_letter(kFailure, message.text)
                         .value_or("failed: it sent a line that this version does not know");
    }
  }
  void reply(const Peer& peer, const Question& question) {
    std::optional<SharedParts> parts;
    try {
      parts = service_.share(question.key, question.first);
    } catch (const std::exception&) {
      parts =
          std::nullopt;  // a driver that refuses: the peer's wait for the buffer ends in an error
    }
    if (!parts) {
      send_message(peer.socket.get(), kNoBufferLine, {});
      return;
    }
    if (parts->pieces.size() > kPiecesPerReply) parts->pieces.resize(kPiecesPerReply);
    std::vector<int> descriptors;
    for (const device::SharedHandle& piece : parts->pieces)
      descriptors.push_back(piece.descriptor.get());
    // One that waits must get an answer, also where the system has no descriptors left to send.
    if (!send_message(peer.socket.get(), parts_line(*parts), descriptors))
      send_message(peer.socket.get(), kNoBufferLine, {});
  }
  void note_late() {
    const Clock::time_point now = Clock::now();
    const auto failed = [](const Peer& peer) { return !peer.failure.empty(); };
    if (now < next_look_ || std::ranges::any_of(peers_, failed)) return;
    next_look_ = now + timeout_ / FlagWatch::kLooks;
    const std::optional<LatePeer> late = service_.late_peer();
    for (Peer& peer : peers_) {
      if (late && peer.rank == late->rank) peer.failure = late->failure;
    }
  }
  void note_ended() {
    const std::lock_guard lock(mutex_);
    for (const Peer& peer : peers_) {
      if (peer.gone) ended_.insert(peer.rank);
    }
    heard_.notify_all();
  }
  // This rank hears no peer now, and its streams may wait for a peer that ends.
  void repeat_until_stopped(const std::string& failure) noexcept {
    try {
      const std::string message =
          fmt::format("rank {} cannot hear its peers any more: {}", names_.of(rank_), failure);
      std::unique_lock lock(mutex_);
      while (!heard_.wait_for(lock, kRemind, [&] { return stopping_; })) service_.failed(message);
    } catch (const std::exception&) {
      service_.failed({});  // no memory for the words
    }
  }

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

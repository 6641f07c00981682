#include "strata/comm/peer/peer_channel.h"

#include <fmt/core.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <span>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/comm/peer/peer_messages.h"

namespace strata::comm {
namespace {

using Clock = std::chrono::steady_clock;

// The period at which a failure is reported again: late peers may still write flags of streams.
constexpr std::chrono::milliseconds kRemind(20);
// The system closes all sockets of a rank that ended; the bound is for a rank that only closed one.
constexpr std::chrono::seconds kLastWords(5);

// False: the time is over.
bool wait_until(Clock::time_point give_up, std::span<pollfd> waiting) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(give_up - Clock::now()).count();
    const int ready = ::poll(
        waiting.data(), waiting.size(),
        static_cast<int>(std::clamp<std::int64_t>(left, 0, std::numeric_limits<int>::max())));
    if (ready >= 0) return ready > 0;
    if (errno != EINTR) throw CommError(fmt::format("poll failed: {}", errno_text(errno)));
  }
}

}  // namespace

PeerChannel::PeerChannel(Collectives& control, Service& service, std::chrono::milliseconds timeout,
                         RankNames names)
    : service_(service), rank_(control.rank()), timeout_(timeout), names_(names) {
  FileDescriptor listener;
  std::string address;
  const std::string error = error_of([&] {
    wake_ = FileDescriptor(::eventfd(0, EFD_CLOEXEC));
    if (!wake_.valid())
      throw CommError(fmt::format("the system has no event to give: {}", errno_text(errno)));
    listener = listen_at_new_address(address);
  });
  const std::vector<std::string> addresses =
      control.all_gather_text(error.empty() ? "+" + address : "-" + error);
  for (std::size_t r = 0; r < addresses.size(); ++r) {
    if (addresses[r][0] == '+') continue;
    throw CommError(fmt::format("rank {} cannot be reached: {}", names_.of(static_cast<int>(r)),
                                addresses[r].substr(1)));
  }
  const auto all_can = [&](std::string_view what, const auto& step) {
    agree_all_can(control.all_gather_text(error_of(step)), what, names_);
  };
  all_can("reach the others", [&] { connect_to_peers(addresses); });
  all_can("be reached by the others", [&] { accept_peers(listener.get()); });
  thread_ = std::thread([this] { serve(); });
}

void PeerChannel::connect_to_peers(const std::vector<std::string>& addresses) {
  outward_.resize(addresses.size());
  for (std::size_t r = 0; r < addresses.size(); ++r) {
    if (static_cast<int>(r) == rank_) continue;
    outward_[r] = connect_to(addresses[r].substr(1));
    send_message(outward_[r].get(), hello_line(rank_), {});
  }
}

// All peers have connected by now, and each says first which rank it is.
void PeerChannel::accept_peers(int listener) {
  const Clock::time_point give_up = Clock::now() + timeout_;
  std::vector<FileDescriptor> unknown;
  while (peers_.size() + 1 < outward_.size()) {
    std::vector<pollfd> waiting{{listener, POLLIN, 0}};
    for (const FileDescriptor& each : unknown) waiting.push_back({each.get(), POLLIN, 0});
    if (!wait_until(give_up, waiting)) {
      throw CommError(fmt::format("only {} of {} peers said who they are within {} ms",
                                  peers_.size(), outward_.size() - 1, timeout_.count()));
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
std::optional<int> PeerChannel::new_peer(std::string_view hello) const {
  const std::optional<int> rank = rank_in_hello(hello);
  const bool expected =
      rank && *rank >= 0 && *rank < static_cast<int>(outward_.size()) && *rank != rank_;
  const auto known = [&](const Peer& peer) { return peer.rank == *rank; };
  return expected && std::ranges::none_of(peers_, known) ? rank : std::nullopt;
}

PeerChannel::~PeerChannel() {
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

std::optional<SharedParts> PeerChannel::ask(int rank, const std::string& key, std::size_t first) {
  const auto silent = [&] {
    return CommError(
        fmt::format("rank {} lives but does not answer: it was asked for '{}', and the timeout of "
                    "{} ms is over; look there for a process that is stopped or hangs",
                    names_.of(rank), key, timeout_.count()));
  };
  if (silent_.count(rank) != 0) throw silent();
  const int socket = outward_.at(static_cast<std::size_t>(rank)).get();
  if (!asks_no_more_.load() && send_message(socket, question_line({first, key}), {})) {
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
          fmt::format("rank {} answers what this version does not know; all ranks must "
                      "run the same version",
                      names_.of(rank)));
    }
  }
  if (asks_no_more_.load()) throw CommError("this rank has failed: no peer answers it");
  wait_for_end_of(rank);
  throw CommError(fmt::format("rank {} has ended: it does not answer", names_.of(rank)));
}

void PeerChannel::fail(std::string_view told) noexcept {
  asks_no_more_.store(true);
  try {
    const std::string text = failure_line(told);
    for (const FileDescriptor& socket : outward_) {
      if (socket.valid()) send_message(socket.get(), text, {});
    }
  } catch (const std::exception&) {  // no memory for the words: peers see this rank end
    asks_no_more_.store(true);
  }
  stop_asking();
}

void PeerChannel::stop_asking() noexcept {
  asks_no_more_.store(true);
  for (const FileDescriptor& socket : outward_) {
    if (socket.valid()) ::shutdown(socket.get(), SHUT_RD);
  }
}

void PeerChannel::serve() noexcept {
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

bool PeerChannel::serve_once() {
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

// This rank hears no peer now, and its streams may wait for a peer that ends.
void PeerChannel::repeat_until_stopped(const std::string& failure) noexcept {
  try {
    const std::string message =
        fmt::format("rank {} cannot hear its peers any more: {}", names_.of(rank_), failure);
    std::unique_lock lock(mutex_);
    while (!heard_.wait_for(lock, kRemind, [&] { return stopping_; })) service_.failed(message);
  } catch (const std::exception&) {
    service_.failed({});  // no memory for the words
  }
}

void PeerChannel::note_late() {
  const Clock::time_point now = Clock::now();
  const auto failed = [](const Peer& peer) { return !peer.failure.empty(); };
  if (now < next_look_ || std::ranges::any_of(peers_, failed)) return;
  next_look_ = now + timeout_ / FlagWatch::kLooks;
  const std::optional<LatePeer> late = service_.late_peer();
  for (Peer& peer : peers_) {
    if (late && peer.rank == late->rank) peer.failure = late->failure;
  }
}

void PeerChannel::note_ended() {
  const std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) {
    if (peer.gone) ended_.insert(peer.rank);
  }
  heard_.notify_all();
}

// A rank's answers and its words come on different sockets.
void PeerChannel::wait_for_end_of(int rank) {
  std::unique_lock lock(mutex_);
  heard_.wait_for(lock, kLastWords, [&] { return ended_.count(rank) != 0; });
}

void PeerChannel::receive(Peer& peer) {
  const SocketMessage message = receive_message(peer.socket.get());
  if (const std::optional<Question> question = question_in(message.text))
    return reply(peer, *question);
  peer.gone = true;
  if (message.text == kLeaveLine) return;
  if (message.text.empty()) {
    peer.failure = "failed: it has ended";
  } else {
    peer.failure =
        failure_in(message.text).value_or("failed: it sent a line that this version does not know");
  }
}

void PeerChannel::reply(const Peer& peer, const Question& question) {
  std::optional<SharedParts> parts;
  try {
    parts = service_.share(question.key, question.first);
  } catch (const std::exception&) {
    parts = std::nullopt;  // a driver that refuses: the peer's wait for the buffer ends in an error
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

}  // namespace strata::comm

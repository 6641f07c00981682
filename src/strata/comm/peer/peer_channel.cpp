#include "strata/comm/peer/peer_channel.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/comm/peer/descriptor_socket.h"

namespace strata::comm {
namespace {

// First letters of messages.
constexpr char kHello = 'H';   // "H <rank>"
constexpr char kAsk = 'Q';     // "Q <first> <key>"
constexpr char kFailed = 'F';  // "F <reason>"
constexpr char kLeave = 'L';
constexpr char kNone = 'N';   // reply: no such buffer
constexpr char kParts = 'P';  // reply: "P <number> <bytes> <reserved> {<offset> <bytes>}"

constexpr std::size_t kPiecesPerReply = 64;
constexpr std::size_t kReasonMax = 3000;
// How often a failure is told again, to streams whose flags late peers still write.
constexpr int kRemindMs = 20;
// The system closes all sockets of a rank that ended; the bound is for a rank that only closed one.
constexpr std::chrono::seconds kLastWords(5);

std::string text_of(const SharedParts& parts) {
  std::string text =
      fmt::format("{} {} {} {}", kParts, parts.number, parts.bytes.value, parts.reserved.value);
  for (const device::SharedPiece& piece : parts.pieces)
    text += fmt::format(" {} {}", piece.offset.value, piece.bytes.value);
  return text;
}

SharedParts parts_from(SocketMessage message) {
  SharedParts parts;
  std::istringstream text(message.text.substr(1));
  text >> parts.number >> parts.bytes.value >> parts.reserved.value;
  for (FileDescriptor& descriptor : message.descriptors) {
    device::SharedPiece piece;
    text >> piece.offset.value >> piece.bytes.value;
    piece.descriptor = std::move(descriptor);
    parts.pieces.push_back(std::move(piece));
  }
  STRATA_ASSERT(!text.fail());
  return parts;
}

}  // namespace

PeerChannel::PeerChannel(Collectives& control, Service& service, RankNames names)
    : service_(service), rank_(control.rank()), names_(names), wake_(::eventfd(0, EFD_CLOEXEC)) {
  std::string address;
  std::string error;
  try {
    listener_ = listen_at_new_address(address);
  } catch (const CommError& caught) {
    error = caught.what();
  }
  const std::vector<std::string> addresses =
      control.all_gather_text(error.empty() ? "+" + address : "-" + error);
  for (std::size_t r = 0; r < addresses.size(); ++r) {
    if (addresses[r][0] == '+') continue;
    throw CommError(fmt::format("rank {} cannot be reached: {}", names_.of(static_cast<int>(r)),
                                addresses[r].substr(1)));
  }
  try {
    connect_to_peers(addresses);
  } catch (const CommError& caught) {
    error = caught.what();
  }
  require_that_all_can(control.all_gather_text(error), "reach the others", names_);
  thread_ = std::thread([this] { serve(); });
}

void PeerChannel::connect_to_peers(const std::vector<std::string>& addresses) {
  outward_.resize(addresses.size());
  for (std::size_t r = 0; r < addresses.size(); ++r) {
    if (static_cast<int>(r) == rank_) continue;
    outward_[r] = connect_to(addresses[r].substr(1));
    send_message(outward_[r].get(), fmt::format("{} {}", kHello, rank_), {});
  }
}

PeerChannel::~PeerChannel() {
  for (const FileDescriptor& socket : outward_) {
    if (socket.valid()) send_message(socket.get(), std::string(1, kLeave), {});
  }
  if (!thread_.joinable()) return;
  const std::uint64_t one = 1;
  while (::write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
  thread_.join();
}

std::optional<SharedParts> PeerChannel::ask(int rank, const std::string& key, std::size_t first) {
  const int socket = outward_.at(static_cast<std::size_t>(rank)).get();
  if (!failed_.load() && send_message(socket, fmt::format("{} {} {}", kAsk, first, key), {})) {
    SocketMessage message = receive_message(socket);
    if (!message.text.empty() && message.text[0] == kNone) return std::nullopt;
    if (!message.text.empty()) return parts_from(std::move(message));
  }
  if (failed_.load()) throw CommError("this rank has failed: nobody answers it");
  wait_for_end_of(rank);
  throw CommError(fmt::format("rank {} has ended: it does not answer", names_.of(rank)));
}

void PeerChannel::fail(std::string_view reason) noexcept {
  failed_.store(true);
  try {
    const std::string text =
        fmt::format("{} {}", kFailed, reason.substr(0, std::min(reason.size(), kReasonMax)));
    for (const FileDescriptor& socket : outward_) {
      if (!socket.valid()) continue;
      send_message(socket.get(), text, {});
      ::shutdown(socket.get(), SHUT_RD);
    }
  } catch (const std::exception&) {
    return;  // no memory for the words: peers see this rank end
  }
}

void PeerChannel::serve() {
  for (;;) {
    std::vector<pollfd> waiting{{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    bool failed = false;
    for (const Peer& peer : peers_) {
      waiting.push_back({peer.gone ? -1 : peer.socket.get(), POLLIN, 0});
      failed = failed || !peer.failure.empty();
    }
    const int ready = ::poll(waiting.data(), waiting.size(), failed ? kRemindMs : -1);
    if (ready < 0 && errno != EINTR) return;
    if (waiting[0].revents != 0) return;
    const std::size_t known = peers_.size();
    for (std::size_t i = 0; ready > 0 && i < known; ++i) {
      if (waiting[i + 2].revents != 0) receive(peers_[i]);
    }
    if (ready > 0 && waiting[1].revents != 0) accept_peer();
    for (const Peer& peer : peers_) {
      if (!peer.failure.empty()) service_.peer_failed(peer.rank, peer.failure);
    }
    note_ended();
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

void PeerChannel::accept_peer() {
  Peer peer;
  peer.socket = accept_from(listener_.get());
  if (peer.socket.valid()) peers_.push_back(std::move(peer));
}

void PeerChannel::receive(Peer& peer) {
  const SocketMessage message = receive_message(peer.socket.get());
  if (message.text.empty()) return lost(peer, "it has ended");
  const std::string_view rest = std::string_view(message.text).substr(1);
  switch (message.text[0]) {
    case kHello:
      peer.rank = std::stoi(std::string(rest));
      return;
    case kAsk:
      return reply(peer, rest.substr(1));
    case kFailed:
      return lost(peer, std::string(rest.substr(1)));
    case kLeave:
      peer.gone = true;
      return;
    default:
      return lost(peer, "it sent what this version does not know");
  }
}

void PeerChannel::reply(const Peer& peer, std::string_view request) {
  const std::size_t space = request.find(' ');
  const auto first = static_cast<std::size_t>(std::stoull(std::string(request.substr(0, space))));
  std::optional<SharedParts> parts;
  try {
    parts = service_.share(std::string(request.substr(space + 1)), first);
  } catch (const Error&) {
    parts = std::nullopt;  // a driver that refuses: the peer's wait for the buffer ends in an error
  }
  if (!parts) {
    send_message(peer.socket.get(), std::string(1, kNone), {});
    return;
  }
  if (parts->pieces.size() > kPiecesPerReply) parts->pieces.resize(kPiecesPerReply);
  std::vector<int> descriptors;
  for (const device::SharedPiece& piece : parts->pieces)
    descriptors.push_back(piece.descriptor.get());
  // One that waits must get an answer, also where the system has no descriptors left to send.
  if (!send_message(peer.socket.get(), text_of(*parts), descriptors))
    send_message(peer.socket.get(), std::string(1, kNone), {});
}

void PeerChannel::lost(Peer& peer, std::string reason) {
  peer.gone = true;
  peer.failure = std::move(reason);
}

}  // namespace strata::comm

// The signals between the ranks of one host beside their operations: flags in shared memory, for
// which streams wait, and messages through sockets. Threads, ownership, errors: with each.
#pragma once

#include <fmt/core.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/file_descriptor.h"
#include "strata/base/units.h"
#include "strata/device/device.h"

namespace strata::comm {

// The counts by which streams of different ranks wait for each other, in memory of the host that
// every rank maps. Each has one writer and one reader.
// Threads: flags are atomic. Ownership: a view of memory that its user keeps mapped, zeroed at
// first.
class PeerFlags {
 public:
  enum class Kind {
    kWritten,   // contributions to reductions that `from` has written
    kRead,      // contributions to reductions that `from` has read from `to`
    kBarrier,   // barriers before which `from` has changed what it changes
    kGathered,  // barriers before which `from` has gathered what it gathers
    kGiven,     // exchanges of values to which `from` has given its own
    kRounds,    // rounds of gathers that `from` has finished
  };

  PeerFlags() = default;
  PeerFlags(std::span<std::byte> memory, int world_size)
      : first_(memory.data()), world_size_(world_size) {}

  static Bytes bytes_for(int world_size) {
    return Bytes(static_cast<std::int64_t>(kKinds * world_size + 1 + kTurns) * world_size *
                 static_cast<std::int64_t>(kLine));
  }

  device::Flag& at(Kind kind, int from, int to) const {
    return flag((static_cast<int>(kind) * world_size_ + from) * world_size_ + to);
  }
  // How often `rank` has freed a buffer, so that its peers drop their mappings.
  device::Flag& freed(int rank) const { return flag(kKinds * world_size_ * world_size_ + rank); }

  // Where each rank puts what it gives to exchange `number`, one after another, each kLine apart.
  // Two exchanges have room: no rank gives to exchange `number` + 2 before all have taken from
  // this.
  std::span<std::byte> values(std::uint32_t number) const {
    const auto turn = static_cast<int>(number % static_cast<std::uint32_t>(kTurns));
    const int first = kKinds * world_size_ * world_size_ + world_size_ * (1 + turn);
    return {first_ + static_cast<std::size_t>(first) * kLine,
            static_cast<std::size_t>(world_size_) * kLine};
  }
  static constexpr std::size_t kLine = 64;  // a flag has a cache line to itself

  // Lets every stream of `rank` run, whatever it waits for: a peer will never write the flag.
  void release(int rank) const noexcept {
    for (int kind = 0; kind < kKinds; ++kind) {
      for (int from = 0; from < world_size_; ++from) {
        if (from != rank) at(static_cast<Kind>(kind), from, rank).store(kReleased);
      }
    }
  }
  static constexpr std::uint32_t kReleased = 0x7FFFFFFF;  // beyond all counts

 private:
  static constexpr int kKinds = 6;
  static constexpr int kTurns = 2;

  device::Flag& flag(int index) const {
    return *reinterpret_cast<device::Flag*>(first_ + static_cast<std::size_t>(index) * kLine);
  }

  std::byte* first_ = nullptr;
  int world_size_ = 0;
};

inline std::string_view text_of(PeerFlags::Kind kind) {
  constexpr std::array<std::string_view, 6> kTexts = {
      "its part of a reduction",   "it to read this rank's part of a reduction",
      "it at a barrier",           "it at a barrier",
      "its values of an exchange", "it to read this rank's new weights"};
  return kTexts.at(static_cast<std::size_t>(kind));
}

// Watches the flags of peers for which this rank's streams wait, so that no wait lasts for ever: a
// stopped or hanging peer never writes its flag, and its socket stays open. Time is counted
// in looks, some in each timeout: a whole job that is stopped and goes on again has missed at most
// one. Threads: internally synchronised. Ownership: borrows the flags, which outlive it. Units:
// milliseconds.

struct LatePeer {
  int rank = 0;
  std::string failure;  // what follows its name: "lives but ..."
};

class FlagWatch {
 public:
  static constexpr int kLooks = 4;  // in a timeout

  explicit FlagWatch(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  // A stream is about to wait until the flag, which `peer` writes, has reached `value`.
  void expect(PeerFlags::Kind kind, int peer, const device::Flag& flag, std::uint32_t value) {
    const std::lock_guard lock(mutex_);
    const auto [place, is_new] = waits_.try_emplace(&flag, Wait{kind, peer, value, value});
    Wait& wait = place->second;
    wait.newest = value;
    if (is_new || !device::reached(flag.load(), wait.oldest)) return;
    wait.oldest = value;
    wait.looks = 0;
  }
  // Called kLooks times in a timeout. A peer for which a stream waited at more looks in a row.
  std::optional<LatePeer> look() {
    const std::lock_guard lock(mutex_);
    for (auto& [flag, wait] : waits_) {
      const std::uint32_t count = flag->load();
      if (device::reached(count, wait.oldest)) {
        wait.oldest = wait.newest;
        wait.looks = 0;
      }
      if (device::reached(count, wait.oldest) || ++wait.looks <= kLooks) continue;
      return LatePeer{
          wait.peer,
          fmt::format("lives but does not come: this rank's streams have waited for {} longer than "
                      "the timeout of {} ms; look there for a process that is stopped, hangs or "
                      "runs torch.compile",
                      text_of(wait.kind), timeout_.count())};
    }
    return std::nullopt;
  }

 private:
  // The oldest value of one flag that is not known to be there, and the newest.
  struct Wait {
    PeerFlags::Kind kind = PeerFlags::Kind::kWritten;
    int peer = 0;
    std::uint32_t oldest = 0;
    std::uint32_t newest = 0;
    int looks = 0;  // at which the oldest was not there
  };

  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::map<const device::Flag*, Wait> waits_;  // guarded by mutex_
};

// Messages between the ranks of one host beside their operations: sockets that keep messages apart
// and carry file descriptors, and the lines that travel on them. Every reader of a line takes
// any text, and gives nothing for another line or one that this version does not know.
// Threads: a socket's end is used by one thread at a time; lines are pure functions. Units: bytes.
// Errors: CommError where a socket cannot be made; a peer that has ended shows in results.

struct SocketMessage {
  std::string text;  // empty: the other end is closed
  std::vector<FileDescriptor> descriptors;
};

inline constexpr std::size_t kTextMax = 4096;
inline constexpr std::size_t kDescriptorsMax = 64;

inline FileDescriptor new_socket() {
  FileDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (socket.valid()) return socket;
  throw CommError("the system has no local socket to give: {}", errno_text(errno));
}

// In the namespace of names without files: its first byte is zero.
inline socklen_t fill_address(sockaddr_un& target, const std::string& address) {
  target = {};
  target.sun_family = AF_UNIX;
  STRATA_ASSERT(address.size() + 1 < sizeof(target.sun_path));
  std::memcpy(target.sun_path + 1, address.data(), address.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + address.size());
}

struct alignas(cmsghdr) DescriptorRoom {
  std::array<std::byte, CMSG_SPACE(sizeof(int) * kDescriptorsMax)> bytes;
};

// `address`: what connect_to() takes, in this or another process.
inline FileDescriptor listen_at_new_address(std::string& address) {
  FileDescriptor socket = new_socket();
  std::random_device random;
  address = fmt::format("strata.{}.{:08x}{:08x}", ::getpid(), random(), random());
  sockaddr_un name{};
  const socklen_t length = fill_address(name, address);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&name), length) != 0 ||
      ::listen(socket.get(), SOMAXCONN) != 0) {
    throw CommError("a local socket cannot listen: {}", errno_text(errno));
  }
  return socket;
}

inline FileDescriptor connect_to(const std::string& address) {
  FileDescriptor socket = new_socket();
  sockaddr_un name{};
  const socklen_t length = fill_address(name, address);
  while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&name), length) != 0) {
    if (errno == EINTR) continue;
    throw CommError("a rank of this host cannot be reached by a local socket ({}): {}", address,
                    errno_text(errno));
  }
  return socket;
}

// A connection of a process of the same user; nothing where it was another's, or is gone again.
// CommError where the system has no descriptor for it.
inline FileDescriptor accept_from(int listener) {
  FileDescriptor socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (!socket.valid()) {
    if (errno == ECONNABORTED || errno == EINTR || errno == EAGAIN) return socket;
    throw CommError("a connection of another rank cannot be accepted: {}", errno_text(errno));
  }
  ucred other{};
  socklen_t length = sizeof other;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &other, &length) != 0 ||
      other.uid != ::getuid()) {
    return {};
  }
  return socket;
}

// At most 4 KiB of text, not empty, and 64 descriptors. False: the other end is closed.
inline bool send_message(int socket, std::string_view text,
                         std::span<const int> descriptors) noexcept {
  if (text.empty() || text.size() > kTextMax || descriptors.size() > kDescriptorsMax) return false;
  iovec part{const_cast<char*>(text.data()), text.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  DescriptorRoom control{};
  if (!descriptors.empty()) {
    message.msg_control = control.bytes.data();
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size_bytes());
  }
  for (;;) {
    if (::sendmsg(socket, &message, MSG_NOSIGNAL) >= 0) return true;
    if (errno != EINTR) return false;
  }
}

inline SocketMessage receive_message(int socket) {
  SocketMessage result;
  result.text.resize(kTextMax);
  iovec part{result.text.data(), result.text.size()};
  DescriptorRoom control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes.data();
  message.msg_controllen = control.bytes.size();
  ssize_t got = -1;
  do {
    got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  result.text.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); got > 0 && header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(header) + i * sizeof descriptor, sizeof descriptor);
      result.descriptors.emplace_back(descriptor);
    }
  }
  return result;
}

// One of a rank's buffers, as it describes it to its peers.
struct SharedParts {
  std::uint64_t number = 0;  // of the buffer among all that the rank ever had
  Bytes bytes;               // asked for
  Bytes reserved;            // of address space, for all pieces to come
  std::vector<device::SharedHandle> pieces;
};

// A rank's question to another one: for the pieces from `first` on of the buffer with this key.
struct Question {
  std::size_t first = 0;
  std::string key;
};

inline constexpr std::string_view kLeaveLine = "L";     // the rank goes
inline constexpr std::string_view kNoBufferLine = "N";  // reply: there is no such buffer
inline constexpr std::size_t kPiecesPerReply = 64;      // what a message can carry

// Each line begins with its letter, and a space where more follows.
inline constexpr char kHello = 'H';     // "H <rank>"
inline constexpr char kQuestion = 'Q';  // "Q <first> <key>"
inline constexpr char kFailure = 'F';   // "F <told>": the rank's fate, cut to kToldMax
inline constexpr char kParts = 'P';     // "P <number> <bytes> <reserved> {<offset> <bytes>}"
inline constexpr std::size_t kToldMax = 3000;

// The text after the letter; absent if the line has another letter, or ends with it.
inline std::optional<std::string_view> after_letter(char letter, std::string_view line) {
  if (line.size() < 3 || line[0] != letter || line[1] != ' ') return std::nullopt;
  return line.substr(2);
}

template <typename Number>
std::optional<Number> number_in(std::string_view text) {
  Number number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end) return std::nullopt;
  return number;
}

inline std::optional<Question> question_in(std::string_view line) {
  const std::optional<std::string_view> rest = after_letter(kQuestion, line);
  if (!rest) return std::nullopt;
  const std::size_t space = rest->find(' ');
  if (space == std::string_view::npos || space + 1 == rest->size()) return std::nullopt;
  const auto first = number_in<std::size_t>(rest->substr(0, space));
  if (!first) return std::nullopt;
  return Question{*first, std::string(rest->substr(space + 1))};
}

// Descriptors travel beside the line, in the order of pieces.
inline std::string parts_line(const SharedParts& parts) {
  std::string text =
      fmt::format("{} {} {} {}", kParts, parts.number, parts.bytes.value, parts.reserved.value);
  for (const device::SharedHandle& piece : parts.pieces)
    text += fmt::format(" {} {}", piece.offset.value, piece.bytes.value);
  return text;
}

inline std::optional<SharedParts> parts_in(SocketMessage message) {
  const std::optional<std::string_view> numbers = after_letter(kParts, message.text);
  if (!numbers) return std::nullopt;
  SharedParts parts;
  std::istringstream text{std::string(*numbers)};
  text >> parts.number >> parts.bytes.value >> parts.reserved.value;
  for (FileDescriptor& descriptor : message.descriptors) {
    device::SharedHandle piece;
    text >> piece.offset.value >> piece.bytes.value;
    piece.descriptor = std::move(descriptor);
    parts.pieces.push_back(std::move(piece));
  }
  if (text.fail()) return std::nullopt;
  return parts;
}

}  // namespace strata::comm

#include "strata/comm/peer/peer_messages.h"

#include <fmt/core.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <random>
#include <sstream>
#include <utility>

#include "strata/base/error.h"

namespace strata::comm {
namespace {

constexpr std::size_t kTextMax = 4096;
constexpr std::size_t kDescriptorsMax = 64;

FileDescriptor new_socket() {
  FileDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (socket.valid()) return socket;
  throw CommError("the system has no local socket to give: {}", errno_text(errno));
}

// In the namespace of names without files: its first byte is zero.
socklen_t fill(sockaddr_un& target, const std::string& address) {
  target = {};
  target.sun_family = AF_UNIX;
  STRATA_ASSERT(address.size() + 1 < sizeof(target.sun_path));
  std::memcpy(target.sun_path + 1, address.data(), address.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + address.size());
}

struct alignas(cmsghdr) DescriptorRoom {
  std::array<std::byte, CMSG_SPACE(sizeof(int) * kDescriptorsMax)> bytes;
};

}  // namespace

FileDescriptor listen_at_new_address(std::string& address) {
  FileDescriptor socket = new_socket();
  std::random_device random;
  address = fmt::format("strata.{}.{:08x}{:08x}", ::getpid(), random(), random());
  sockaddr_un name{};
  const socklen_t length = fill(name, address);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&name), length) != 0 ||
      ::listen(socket.get(), SOMAXCONN) != 0) {
    throw CommError("a local socket cannot listen: {}", errno_text(errno));
  }
  return socket;
}

FileDescriptor connect_to(const std::string& address) {
  FileDescriptor socket = new_socket();
  sockaddr_un name{};
  const socklen_t length = fill(name, address);
  while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&name), length) != 0) {
    if (errno == EINTR) continue;
    throw CommError("a rank of this host cannot be reached by a local socket ({}): {}", address,
                    errno_text(errno));
  }
  return socket;
}

FileDescriptor accept_from(int listener) {
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

bool send_message(int socket, std::string_view text, std::span<const int> descriptors) noexcept {
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

SocketMessage receive_message(int socket) {
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

namespace {

// Each line begins with its letter, and a space where more follows.
constexpr char kHello = 'H';     // "H <rank>"
constexpr char kQuestion = 'Q';  // "Q <first> <key>"
constexpr char kFailure = 'F';   // "F <told>"
constexpr char kParts = 'P';     // "P <number> <bytes> <reserved> {<offset> <bytes>}"
constexpr std::size_t kToldMax = 3000;

// The text after the letter; absent if the line has another letter, or ends with it.
std::optional<std::string_view> after(char letter, std::string_view line) {
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

}  // namespace

std::string hello_line(int rank) {
  return fmt::format("{} {}", kHello, rank);
}

std::optional<int> rank_in_hello(std::string_view line) {
  const std::optional<std::string_view> rank = after(kHello, line);
  return rank ? number_in<int>(*rank) : std::nullopt;
}

std::string question_line(const Question& question) {
  return fmt::format("{} {} {}", kQuestion, question.first, question.key);
}

std::optional<Question> question_in(std::string_view line) {
  const std::optional<std::string_view> rest = after(kQuestion, line);
  if (!rest) return std::nullopt;
  const std::size_t space = rest->find(' ');
  if (space == std::string_view::npos || space + 1 == rest->size()) return std::nullopt;
  const auto first = number_in<std::size_t>(rest->substr(0, space));
  if (!first) return std::nullopt;
  return Question{*first, std::string(rest->substr(space + 1))};
}

std::string failure_line(std::string_view told) {
  return fmt::format("{} {}", kFailure, told.substr(0, kToldMax));
}

std::optional<std::string> failure_in(std::string_view line) {
  const std::optional<std::string_view> told = after(kFailure, line);
  return told ? std::optional(std::string(*told)) : std::nullopt;
}

std::string parts_line(const SharedParts& parts) {
  std::string text =
      fmt::format("{} {} {} {}", kParts, parts.number, parts.bytes.value, parts.reserved.value);
  for (const device::SharedHandle& piece : parts.pieces)
    text += fmt::format(" {} {}", piece.offset.value, piece.bytes.value);
  return text;
}

std::optional<SharedParts> parts_in(SocketMessage message) {
  const std::optional<std::string_view> numbers = after(kParts, message.text);
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

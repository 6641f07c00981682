// Messages between the ranks of one host beside their operations: sockets that keep messages apart
// and carry file descriptors, and the lines that travel on them. Every reader of a line takes
// any text, and gives nothing for another line or one that this version does not know.
// Threads: a socket's end is used by one thread at a time; lines are pure functions. Units: bytes.
// Errors: CommError where a socket cannot be made; a peer that has ended shows in results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "strata/base/file_descriptor.h"
#include "strata/base/units.h"
#include "strata/device/device.h"

namespace strata::comm {

struct SocketMessage {
  std::string text;  // empty: the other end is closed
  std::vector<FileDescriptor> descriptors;
};

// `address`: what connect_to() takes, in this or another process.
FileDescriptor listen_at_new_address(std::string& address);
FileDescriptor connect_to(const std::string& address);
// A connection of a process of the same user; nothing where it was another's, or is gone again.
// CommError where the system has no descriptor for it.
FileDescriptor accept_from(int listener);

// At most 4 KiB of text, not empty, and 64 descriptors. False: the other end is closed.
bool send_message(int socket, std::string_view text, std::span<const int> descriptors) noexcept;
SocketMessage receive_message(int socket);

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

std::string hello_line(int rank);
std::optional<int> rank_in_hello(std::string_view line);

std::string question_line(const Question& question);
std::optional<Question> question_in(std::string_view line);

// `told`: the fate of the rank, as it follows the rank's name. Long texts are cut.
std::string failure_line(std::string_view told);
std::optional<std::string> failure_in(std::string_view line);

// Descriptors travel beside the line, in the order of pieces.
std::string parts_line(const SharedParts& parts);
std::optional<SharedParts> parts_in(SocketMessage message);

}  // namespace strata::comm

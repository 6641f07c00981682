// The lines that ranks send each other through a PeerChannel, made and read. Every reader takes any
// text and gives nothing where it is another line, or none that this version knows.
// Pure; any thread. Units: bytes. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "strata/base/units.h"
#include "strata/comm/peer/descriptor_socket.h"
#include "strata/device/shared_memory.h"

namespace strata::comm {

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

// `told`: what became of the rank, as it follows the rank's name. Long ones are cut.
std::string failure_line(std::string_view told);
std::optional<std::string> failure_in(std::string_view line);

// Descriptors travel beside the line, in the order of pieces.
std::string parts_line(const SharedParts& parts);
std::optional<SharedParts> parts_in(SocketMessage message);

}  // namespace strata::comm

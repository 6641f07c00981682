// Sockets between processes of one host that keep messages apart and carry file descriptors.
// Addresses are names that vanish with the socket. Threads: one at a time for each end. Errors:
// CommError where a socket cannot be made; a peer that has ended shows in results.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "strata/base/file_descriptor.h"

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

}  // namespace strata::comm

// Short notes in the c10d Store by which ranks report a broken process group, one per rank; the
// last note of a rank counts. So an error can name the rank that gave up, and its reason, although
// the backend only says that a connection closed. Threads: one thread a rank. Ownership: shares the
// store. Errors: none; a store that cannot be reached counts as one without notes.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace strata::torch {

struct PeerNote {
  enum class Kind : char { kAt = 'w', kFailed = 'f', kGaveUp = 'a', kLeft = 'l' };
  Kind kind;
  std::string text;  // where it was, the error, the reason; empty for kLeft
};

class PeerNotes {
 public:
  PeerNotes(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, int world_size);

  void post(PeerNote::Kind kind, std::string_view text) noexcept;
  // The latest note of every rank, this one included; nullopt for a rank without a note.
  std::vector<std::optional<PeerNote>> read() noexcept;
  // Like read(), but waits up to `limit` for a note of every rank.
  std::vector<std::optional<PeerNote>> wait_for_all(std::chrono::milliseconds limit) noexcept;

 private:
  std::string key(int rank) const;

  c10::intrusive_ptr<c10d::Store> store_;
  std::string name_;
  int rank_;
  int world_size_;
};

}  // namespace strata::torch

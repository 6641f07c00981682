// The first failure of a process group. It is kept, so that every later call throws it again, and
// posted in notes, so that every other rank can name the failed rank and the reason. Threads: one
// thread a rank. Ownership: shares the store. Errors: CommError.
#pragma once

#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/torch/ranks/peer_notes.h"

namespace strata::torch {

class GroupFailure {
 public:
  // `id` distinguishes the groups that share a store; it is the same on every rank, and never used
  // again.
  GroupFailure(c10::intrusive_ptr<c10d::Store> store, std::string id, int rank, int world_size,
               comm::RankNames names = {});
  GroupFailure(const GroupFailure&) = delete;
  GroupFailure& operator=(const GroupFailure&) = delete;

  bool happened() const { return !error_.empty(); }
  // Throws the failure, if there was one.
  void rethrow() const;
  // Throws, and keeps, the failure that another rank has posted, if one has.
  void throw_if_a_peer_failed();
  // Reads the other ranks' notes, because a backend only knows that a connection closed. Then
  // keeps, posts and throws the resulting failure. `error`: the backend's message.
  [[noreturn]] void fail(std::string_view what, std::string_view error);
  // Keeps, posts and throws `message` unchanged.
  [[noreturn]] void fail_with(std::string message);
  // Keeps the end of this rank as its failure, and posts it.
  void end(comm::Ending ending, std::string_view reason) noexcept;
  // Posts that this rank's collectives are destroyed, unless there was a failure.
  void destroyed() noexcept;
  // Collectives::all_left(): the rank that has the store may end at any time.
  void all_left() noexcept { told_all_ = true; }

  // Runs a call of the backend.
  template <typename Call>
  auto guarded(std::string_view what, Call&& call) -> decltype(call()) {
    rethrow();
    try {
      return std::forward<Call>(call)();
    } catch (const std::exception& error) {
      fail(what, error.what());
    }
  }

 private:
  std::string most_telling(const std::vector<std::optional<PeerNote>>& notes) const;

  int rank_;
  comm::RankNames names_;
  PeerNotes notes_;
  std::string error_;  // empty while all is well
  bool told_all_ = false;
};

}  // namespace strata::torch

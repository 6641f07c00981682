// The one failure of a process group: kept, so that every later call throws it again, and told to
// the other ranks by notes, so that each can say which rank failed and why. Threads: one thread a
// rank. Ownership: shares the store. Errors: CommError.
#pragma once

#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/comm/comm_options.h"
#include "strata/torch/ranks/peer_notes.h"

namespace strata::torch {

class GroupFailure {
 public:
  // `id` tells the groups that share a store apart; the same on every rank, and never used again.
  GroupFailure(c10::intrusive_ptr<c10d::Store> store, std::string id, int rank, int world_size,
               comm::RankNames names = {});
  GroupFailure(const GroupFailure&) = delete;
  GroupFailure& operator=(const GroupFailure&) = delete;

  bool happened() const { return !error_.empty(); }
  // Throws the failure, if there was one.
  void rethrow() const;
  // Throws, and keeps, the failure that another rank has posted, if one has.
  void throw_if_a_peer_failed();
  // Asks the others what happened to them, since a backend only knows that a connection went, then
  // keeps, posts and throws what comes out. `error`: the backend's.
  [[noreturn]] void fail(std::string_view what, std::string_view error);
  // Keeps, posts and throws `message` as it is.
  [[noreturn]] void fail_with(std::string message);
  // Keeps the end of this rank as its failure, and posts it.
  void end(comm::Ending ending, std::string_view reason) noexcept;
  // Tells the others that the rank's collectives go, if all was well.
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

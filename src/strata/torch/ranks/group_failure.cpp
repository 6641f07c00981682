#include "strata/torch/ranks/group_failure.h"

#include <fmt/core.h>

#include <utility>

#include "strata/base/error.h"

namespace strata::torch {
namespace {

constexpr std::chrono::milliseconds kNoteWait{1000};

}  // namespace

GroupFailure::GroupFailure(c10::intrusive_ptr<c10d::Store> store, std::string id, int rank,
                           int world_size, comm::RankNames names)
    : rank_(rank), names_(names), notes_(std::move(store), std::move(id), rank, world_size) {}

void GroupFailure::destroyed() noexcept {
  if (error_.empty() && !told_all_) notes_.post(PeerNote::Kind::kLeft, "");
}

void GroupFailure::rethrow() const {
  if (!error_.empty()) throw CommError(error_);
}

void GroupFailure::throw_if_a_peer_failed() {
  for (const auto& note : notes_.read()) {
    if (!note.has_value() || note->kind == PeerNote::Kind::kAt ||
        note->kind == PeerNote::Kind::kLeft)
      continue;
    error_ = note->text;
    throw CommError(error_);
  }
}

void GroupFailure::fail(std::string_view what, std::string_view error) {
  rethrow();
  notes_.post(PeerNote::Kind::kAt, std::string(what));
  const std::string cause = most_telling(notes_.wait_for_all(kNoteWait));
  fail_with(fmt::format("rank {}: {} failed: {} ({})", names_.of(rank_), what, cause, error));
}

void GroupFailure::fail_with(std::string message) {
  error_ = std::move(message);
  notes_.post(PeerNote::Kind::kFailed, error_);
  throw CommError(error_);
}

void GroupFailure::end(comm::Ending ending, std::string_view reason) noexcept {
  if (!error_.empty()) return;
  try {
    error_ = fmt::format("rank {} {}: {}", names_.of(rank_),
                         ending == comm::Ending::kLeft ? "left" : "gave up", reason);
  } catch (const std::exception&) {  // no memory for the message
    error_ = "a rank gave up";
  }
  notes_.post(PeerNote::Kind::kGaveUp, error_);
}

// Prefers a reason that a rank gave, then a rank that is absent, then another rank's report of
// either.
std::string GroupFailure::most_telling(const std::vector<std::optional<PeerNote>>& notes) const {
  std::string absent;
  std::string failed;
  for (std::size_t r = 0; r < notes.size(); ++r) {
    const auto& note = notes[r];
    if (r == static_cast<std::size_t>(rank_)) continue;
    if (!note.has_value()) {
      absent = fmt::format("rank {} did not come or is gone", names_.of(static_cast<int>(r)));
    } else if (note->kind == PeerNote::Kind::kGaveUp) {
      return note->text;
    } else if (note->kind == PeerNote::Kind::kLeft) {
      absent = fmt::format("rank {} has left", names_.of(static_cast<int>(r)));
    } else if (note->kind == PeerNote::Kind::kFailed) {
      failed = note->text;
    }
  }
  if (!absent.empty()) return absent;
  return failed.empty() ? "the connection broke" : failed;
}

}  // namespace strata::torch

#include "strata/torch/ranks/group_work.h"

#include <fmt/core.h>

#include <algorithm>
#include <thread>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"

namespace strata::torch {
namespace {

constexpr std::chrono::milliseconds kNoteWait{1000};

}  // namespace

GroupFailure::GroupFailure(c10::intrusive_ptr<c10d::Store> store, std::string id, int rank,
                           int world_size, comm::RankNames names, Stop stop)
    : store_(std::move(store)),
      id_(std::move(id)),
      rank_(rank),
      world_size_(world_size),
      names_(names),
      stop_(std::move(stop)) {}

std::string GroupFailure::key(int rank) const {
  return fmt::format("strata/notes/{}/{}", id_, rank);
}

void GroupFailure::post(Kind kind, std::string_view text) noexcept {
  try {
    const std::string note = static_cast<char>(kind) + std::string(text);
    store_->set(key(rank_), std::vector<std::uint8_t>(note.begin(), note.end()));
  } catch (const std::exception&) {
    return;  // the store is gone; the backend's own error must suffice
  }
}

GroupFailure::Notes GroupFailure::read() noexcept {
  Notes notes(static_cast<std::size_t>(world_size_));
  try {
    for (int r = 0; r < world_size_; ++r) {
      if (!store_->check({key(r)})) continue;
      const std::vector<std::uint8_t> bytes = store_->get(key(r));
      notes[static_cast<std::size_t>(r)].assign(bytes.begin(), bytes.end());
    }
  } catch (const std::exception&) {
    return notes;
  }
  return notes;
}

GroupFailure::Notes GroupFailure::wait_for_all(std::chrono::milliseconds limit) noexcept {
  const auto end = std::chrono::steady_clock::now() + limit;
  for (;;) {
    auto notes = read();
    const bool all = std::ranges::count(notes, std::string()) == 0;
    if (all || std::chrono::steady_clock::now() >= end) return notes;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void GroupFailure::destroyed() noexcept {
  if (error_.empty() && !told_all_) post(kLeft, "");
}

void GroupFailure::rethrow() const {
  if (!error_.empty()) throw CommError(error_);
}

void GroupFailure::throw_if_a_peer_failed() {
  for (const auto& note : read()) {
    if (note.empty() || note[0] == kAt || note[0] == kLeft) continue;
    error_ = note.substr(1);
    throw CommError(error_);
  }
}

void GroupFailure::stop(std::string_view reason) noexcept {
  if (const Stop once = std::exchange(stop_, nullptr)) once(reason);
}

void GroupFailure::fail(std::string_view what, std::string_view error) {
  if (!error_.empty()) stop(error_);
  rethrow();
  post(kAt, std::string(what));
  const std::string cause = most_telling(wait_for_all(kNoteWait));
  fail_with(fmt::format("rank {}: {} failed: {} ({})", names_.of(rank_), what, cause, error));
}

void GroupFailure::fail_with(std::string message) {
  error_ = std::move(message);
  post(kFailed, error_);
  stop(error_);
  throw CommError(error_);
}

void GroupFailure::end(comm::Ending ending, std::string_view reason) noexcept {
  if (!error_.empty()) return stop(reason);
  try {
    error_ = fmt::format("rank {} {}: {}", names_.of(rank_),
                         ending == comm::Ending::kLeft ? "left" : "gave up", reason);
  } catch (const std::exception&) {  // no memory for the message
    error_ = "a rank gave up";
  }
  post(kGaveUp, error_);
  stop(reason);
}

// Prefers a reason that a rank gave, then a rank that is absent, then another rank's report of
// either.
std::string GroupFailure::most_telling(const Notes& notes) const {
  std::string absent;
  std::string failed;
  for (std::size_t r = 0; r < notes.size(); ++r) {
    const auto& note = notes[r];
    if (r == static_cast<std::size_t>(rank_)) continue;
    if (note.empty()) {
      absent = fmt::format("rank {} did not come or is gone", names_.of(static_cast<int>(r)));
    } else if (note[0] == kGaveUp) {
      return note.substr(1);
    } else if (note[0] == kLeft) {
      absent = fmt::format("rank {} has left", names_.of(static_cast<int>(r)));
    } else if (note[0] == kFailed) {
      failed = note.substr(1);
    }
  }
  if (!absent.empty()) return absent;
  return failed.empty() ? "the connection broke" : failed;
}

GroupWork::~GroupWork() {
  try {
    GroupWork::wait();
  } catch (const std::exception&) {
    return;  // a caller that wants the error calls wait()
  }
}

void GroupWork::wait() {
  if (failure_.has_value()) throw CommError(*failure_);
  if (!work_) return;
  const auto work = std::exchange(work_, nullptr);
  try {
    work->wait();
    if (finish_) finish_();
  } catch (const std::exception& error) {
    failure_ = comm::error_of([&] { group_->fail(what_, error.what()); });
    throw CommError(*failure_);
  }
}

NamedBuffer::NamedBuffer(std::string name, std::shared_ptr<BufferNames> names,
                         std::shared_ptr<void> owner, std::span<std::byte> memory,
                         std::function<void()> before_free, device::GrowableMemory* growable)
    : SharedBuffer(std::move(name)),
      names_(std::move(names)),
      owner_(std::move(owner)),
      memory_(memory),
      before_free_(std::move(before_free)),
      growable_(growable) {
  const std::lock_guard lock(names_->mutex);
  if (!names_->living.insert(SharedBuffer::name()).second) {
    throw UsageError("a buffer named '{}' exists already; names are unique", SharedBuffer::name());
  }
}

NamedBuffer::~NamedBuffer() {
  if (before_free_) before_free_();
  const std::lock_guard lock(names_->mutex);
  names_->living.erase(name());
}

void NamedBuffer::release() {
  if (before_free_) before_free_();
  if (growable_ != nullptr) growable_->release();
}

}  // namespace strata::torch

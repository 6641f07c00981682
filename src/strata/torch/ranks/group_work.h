// The parts that the collectives over a c10d backend share: their operations, their named memory,
// and their one failure. Threads: one thread a rank; buffers may be destroyed in any. Errors:
// CommError, UsageError for names that are in use.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/comm/collectives.h"

namespace strata::torch {

// The first failure of a process group. It is kept, so that every later call throws it again, and
// posted as a note in the c10d Store, so that every other rank can name the failed rank and the
// reason: the backend only says that a connection closed. A rank has one note, its last. A store
// that cannot be reached counts as one without notes. Shares the store.
class GroupFailure : NonCopyable {
 public:
  // Ends what else belongs to the group, with the reason.
  using Stop = std::function<void(std::string_view)>;
  // `id` distinguishes the groups that share a store; it is the same on every rank, and never used
  // again. `stop`: called once, when this rank has failed or ended; may be null.
  GroupFailure(c10::intrusive_ptr<c10d::Store> store, std::string id, int rank, int world_size,
               comm::RankNames names = {}, Stop stop = nullptr)
      : store_(std::move(store)),
        id_(std::move(id)),
        rank_(rank),
        world_size_(world_size),
        names_(names),
        stop_(std::move(stop)) {}

  // Throws the failure, if there was one.
  void rethrow() const {
    if (!error_.empty()) throw CommError(error_);
  }
  // Throws, and keeps, the failure that another rank has posted, if one has.
  void throw_if_a_peer_failed() {
    for (const auto& note : read()) {
      if (note.empty() || note[0] == kAt || note[0] == kLeft) continue;
      error_ = note.substr(1);
      throw CommError(error_);
    }
  }
  // Reads the other ranks' notes. Then keeps, posts and throws the resulting failure. `error`: the
  // backend's message.
  [[noreturn]] void fail(std::string_view what, std::string_view error) {
    if (!error_.empty()) stop(error_);
    rethrow();
    post(kAt, std::string(what));
    const std::string cause = most_telling(wait_for_all(kNoteWait));
    fail_with(fmt::format("rank {}: {} failed: {} ({})", names_.of(rank_), what, cause, error));
  }
  // Keeps, posts and throws `message` unchanged.
  [[noreturn]] void fail_with(std::string message) {
    error_ = std::move(message);
    post(kFailed, error_);
    stop(error_);
    throw CommError(error_);
  }
  // Keeps the end of this rank as its failure, and posts it.
  void end(comm::Ending ending, std::string_view reason) noexcept {
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
  // Posts that this rank's collectives are destroyed, unless there was a failure.
  void destroyed() noexcept {
    if (error_.empty() && !told_all_) post(kLeft, "");
  }
  // Collectives::all_left(): the rank that has the store may end at any time.
  void all_left() noexcept { told_all_ = true; }

  // Runs a call of the backend.
  template <typename Call>
  auto guarded(std::string_view what, Call&& call) -> decltype(call()) {
    if (!error_.empty()) fail(what, "");
    try {
      return std::forward<Call>(call)();
    } catch (const std::exception& error) {
      fail(what, error.what());
    }
  }

 private:
  static constexpr std::chrono::milliseconds kNoteWait{1000};
  enum Kind : char { kAt = 'w', kFailed = 'f', kGaveUp = 'a', kLeft = 'l' };
  // By rank: its kind, and where the rank was, the error or the reason; empty: without a note.
  using Notes = std::vector<std::string>;

  std::string key(int rank) const { return fmt::format("strata/notes/{}/{}", id_, rank); }
  void post(Kind kind, std::string_view text) noexcept {
    FirstError of_lost_store;  // dropped: the backend's own error must suffice
    of_lost_store.attempt([&] {
      const std::string note = static_cast<char>(kind) + std::string(text);
      store_->set(key(rank_), std::vector<std::uint8_t>(note.begin(), note.end()));
    });
  }
  Notes read() noexcept {
    Notes notes(static_cast<std::size_t>(world_size_));
    FirstError of_lost_store;  // dropped: it counts as one without notes
    of_lost_store.attempt([&] {
      for (int r = 0; r < world_size_; ++r) {
        if (!store_->check({key(r)})) continue;
        const std::vector<std::uint8_t> bytes = store_->get(key(r));
        notes[static_cast<std::size_t>(r)].assign(bytes.begin(), bytes.end());
      }
    });
    return notes;
  }
  // Like read(), but waits up to `limit` for a note of every rank.
  Notes wait_for_all(std::chrono::milliseconds limit) noexcept {
    const auto end = std::chrono::steady_clock::now() + limit;
    for (;;) {
      auto notes = read();
      const bool all = std::ranges::count(notes, std::string()) == 0;
      if (all || std::chrono::steady_clock::now() >= end) return notes;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  // Prefers a reason that a rank gave, then a rank that is absent, then another rank's report of
  // either.
  std::string most_telling(const Notes& notes) const {
    std::string absent;
    std::string failed;
    for (std::size_t r = 0; r < notes.size(); ++r) {
      const auto& note = notes[r];
      if (r == static_cast<std::size_t>(rank_)) continue;
      if (note.empty())
        absent = fmt::format("rank {} did not come or is gone", names_.of(static_cast<int>(r)));
      else if (note[0] == kGaveUp)
        return note.substr(1);
      else if (note[0] == kLeft)
        absent = fmt::format("rank {} has left", names_.of(static_cast<int>(r)));
      else if (note[0] == kFailed)
        failed = note.substr(1);
    }
    if (!absent.empty()) return absent;
    return failed.empty() ? "the connection broke" : failed;
  }
  void stop(std::string_view reason) noexcept {
    if (const Stop once = std::exchange(stop_, nullptr)) once(reason);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::string id_;
  int rank_;
  int world_size_;
  comm::RankNames names_;
  Stop stop_;          // null: called already
  std::string error_;  // empty while all is well
  bool told_all_ = false;
};

// An operation of a c10d backend as a Work of the Collectives interface. wait() also runs the
// function that finishes the result; on a GPU the current stream waits, not the host. Threads:
// those of the Collectives that made it. Errors: wait() makes the backend's error the group's
// failure and throws it, the same one at each call; the destructor waits and drops errors.
class GroupWork final : public comm::Work {
 public:
  // Complete from the start: there was nothing to do, or it is done.
  GroupWork() = default;
  // `finish` may be null. `what` describes the operation in errors.
  GroupWork(c10::intrusive_ptr<c10d::Work> work, std::function<void()> finish,
            std::shared_ptr<GroupFailure> group, std::string what)
      : work_(std::move(work)),
        finish_(std::move(finish)),
        group_(std::move(group)),
        what_(std::move(what)) {}
  ~GroupWork() override { wait_quietly(); }

  bool done() override { return !work_ || work_->isCompleted(); }
  void wait() override {
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
  void set_times(comm::WorkTimes times) { times_ = std::move(times); }
  comm::WorkTimes times() const override { return times_; }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::function<void()> finish_;
  std::shared_ptr<GroupFailure> group_;
  std::string what_;
  std::optional<std::string> failure_;
  comm::WorkTimes times_;
};

// Starts an exchange of bytes; the backend's ranks are those of the parcels.
inline c10::intrusive_ptr<c10d::Work> start_exchange(c10d::Backend& backend, at::Tensor& target,
                                                     at::Tensor& source,
                                                     const comm::Parcels& parcels) {
  std::vector<std::int64_t> received;
  std::vector<std::int64_t> sent;
  for (int rank = 0; rank < parcels.ranks(); ++rank) {
    received.push_back(parcels.at(rank, backend.getRank()).value);
    sent.push_back(parcels.at(backend.getRank(), rank).value);
  }
  return backend.alltoall_base(target, source, received, sent);
}

// The names of one rank's living buffers, which any thread may destroy.
struct BufferNames {
  std::mutex mutex;
  std::set<std::string> living;
};

// Memory of one rank under a name that no other living buffer of the rank has. Owns the memory,
// shares the names.
class NamedBuffer final : public comm::SharedBuffer {
 public:
  // `owner` keeps `memory`. `before_free` runs before it goes. `growable`: of a buffer that grows.
  // UsageError: the name is in use.
  NamedBuffer(std::string name, std::shared_ptr<BufferNames> names, std::shared_ptr<void> owner,
              std::span<std::byte> memory, std::function<void()> before_free = nullptr,
              device::GrowableMemory* growable = nullptr)
      : SharedBuffer(std::move(name)),
        names_(std::move(names)),
        owner_(std::move(owner)),
        memory_(memory),
        before_free_(std::move(before_free)),
        growable_(growable) {
    const std::lock_guard lock(names_->mutex);
    if (!names_->living.insert(SharedBuffer::name()).second)
      throw UsageError("a buffer named '{}' exists already; names are unique",
                       SharedBuffer::name());
  }
  ~NamedBuffer() override {
    if (before_free_) before_free_();
    const std::lock_guard lock(names_->mutex);
    names_->living.erase(name());
  }

  std::span<std::byte> local() override { return memory_; }
  void back(Bytes bytes) override {
    if (growable_ != nullptr) growable_->grow_to(bytes);
  }
  bool releasable() const override { return growable_ != nullptr; }
  void release() override {
    if (before_free_) before_free_();
    if (growable_ != nullptr) growable_->release();
  }

 private:
  std::shared_ptr<BufferNames> names_;
  std::shared_ptr<void> owner_;
  std::span<std::byte> memory_;
  std::function<void()> before_free_;
  device::GrowableMemory* growable_;  // null: it does not grow
};

}  // namespace strata::torch

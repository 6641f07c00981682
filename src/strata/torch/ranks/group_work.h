// The parts that the collectives over a c10d backend share: their operations, their named memory,
// and their one failure. Threads: one thread a rank; buffers may be destroyed in any. Errors:
// CommError, UsageError for names that are in use.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

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
               comm::RankNames names = {}, Stop stop = nullptr);

  // Throws the failure, if there was one.
  void rethrow() const;
  // Throws, and keeps, the failure that another rank has posted, if one has.
  void throw_if_a_peer_failed();
  // Reads the other ranks' notes. Then keeps, posts and throws the resulting failure. `error`: the
  // backend's message.
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
    if (!error_.empty()) fail(what, "");
    try {
      return std::forward<Call>(call)();
    } catch (const std::exception& error) {
      fail(what, error.what());
    }
  }

 private:
  enum Kind : char { kAt = 'w', kFailed = 'f', kGaveUp = 'a', kLeft = 'l' };
  // By rank: its kind, and where the rank was, the error or the reason; empty: without a note.
  using Notes = std::vector<std::string>;

  std::string key(int rank) const;
  void post(Kind kind, std::string_view text) noexcept;
  Notes read() noexcept;
  // Like read(), but waits up to `limit` for a note of every rank.
  Notes wait_for_all(std::chrono::milliseconds limit) noexcept;
  std::string most_telling(const Notes& notes) const;
  void stop(std::string_view reason) noexcept;

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
  ~GroupWork() override;

  bool done() override { return !work_ || work_->isCompleted(); }
  void wait() override;
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
              device::GrowableMemory* growable = nullptr);
  ~NamedBuffer() override;

  std::span<std::byte> local() override { return memory_; }
  void back(Bytes bytes) override {
    if (growable_ != nullptr) growable_->grow_to(bytes);
  }
  bool releasable() const override { return growable_ != nullptr; }
  void release() override;

 private:
  std::shared_ptr<BufferNames> names_;
  std::shared_ptr<void> owner_;
  std::span<std::byte> memory_;
  std::function<void()> before_free_;
  device::GrowableMemory* growable_;  // null: it does not grow
};

}  // namespace strata::torch

// One rank's connection to the others: numbers its operations, publishes them, waits for peers, and
// turns whatever goes wrong into one CommError that every later call throws again.
// While it waits it calls `progress`, which does work that peers may be waiting for in turn.
// Threads: one thread at a time. Errors: see collectives.h.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "strata/comm/collectives.h"
#include "strata/comm/host/control_block.h"

namespace strata::comm {

// Bytes of some rank's buffer; they stay mapped while keep_alive lives, even if the buffer is
// freed.
struct BufferView {
  std::shared_ptr<const void> keep_alive;
  std::span<const std::byte> bytes;
};

// How the ranks of one host reach each other's memory: the one thing in which ranks that are
// threads and ranks that are processes differ. PullCollectives does the rest. Threads: used by one
// thread of its rank at a time. Errors: CommError where peers' memory cannot be reached,
// OutOfMemoryError from allocate().
class RankMemory {
 public:
  virtual ~RankMemory() = default;
  virtual std::string_view name() const = 0;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // Lives as long as this object.
  virtual ControlBlock& control(int rank) = 0;
  virtual std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) = 0;
  // The living buffer whose name has this id_of(); nothing where the rank has none (yet).
  virtual std::optional<BufferView> find(int rank, std::uint64_t buffer_id) = 0;
  // "process 123 has ended", or empty while the rank lives.
  virtual std::string why_gone(int rank) = 0;
};

class RankLink {
 public:
  // A rank that is not there yet, or kNobody.
  using Missing = std::function<int()>;
  static constexpr int kNobody = -1;

  RankLink(std::unique_ptr<RankMemory> memory, const CommOptions& options);

  RankMemory& memory() { return *memory_; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  // The number of a rank in errors.
  int name_of(int rank) const { return names_.of(rank); }
  // Does some of the work that was put off and returns true, or false when nothing can be done now.
  void set_progress(std::function<bool()> progress) { progress_ = std::move(progress); }

  // At the start of each call: throws if this rank or a peer has stopped.
  void check_usable();
  // Shown to peers until the next call.
  void set_activity(std::string_view text) noexcept;

  // Makes `entry` my next operation and returns its number.
  std::uint64_t publish(const OperationEntry& entry);
  // A rank that has not published operation `number`, or kNobody; likewise for finished.
  int unpublished_by(std::uint64_t number);
  int unfinished_by(std::uint64_t number);
  // Every rank has published `number`: fails unless they agree.
  void check_agreement(std::uint64_t number);
  const OperationEntry& entry(int rank, std::uint64_t number);
  void finish(std::uint64_t number);

  // Returns when missing() is kNobody; `what` says in errors what this rank was waiting for.
  void wait_until(const Missing& missing, const std::function<std::string()>& what);
  void ring_peers() noexcept;

  // Breaks this object for good, notifies the peers, and throws.
  [[noreturn]] void fail(const std::string& message);
  bool broken() const { return !broken_.empty(); }
  void end(Ending ending, std::string_view reason) noexcept;
  // Collectives::announce_departure().
  void announce_departure(std::string_view words) noexcept;
  // The rank's Collectives go, without a reason.
  void destroyed() noexcept;

 private:
  ControlBlock& own() { return memory_->control(rank_); }
  // The fault of a peer, or empty. `ask_system` costs system calls.
  std::string stopped_peer();
  std::string gone_peer(bool ask_system);
  // ": its program ended", what a peer has announced; empty: nothing.
  std::string departure_of(int rank);
  // Breaks this object without notifying the peers, which know it, too.
  [[noreturn]] void fail_quietly(std::string message);
  [[noreturn]] void fail_by_timeout(int missing, const std::string& what);
  void stop(Ending ending, std::string_view reason) noexcept;

  std::unique_ptr<RankMemory> memory_;
  int rank_;
  int world_size_;
  std::chrono::milliseconds timeout_;
  int spins_;
  RankNames names_;
  std::uint64_t next_ = 0;
  std::function<bool()> progress_;
  std::string broken_;  // the error's message, empty while all is well
};

}  // namespace strata::comm

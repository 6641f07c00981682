#include "strata/io/uring_engine.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/io/request_ring.h"
#include "strata/io/thread_engine.h"

namespace strata::io {
namespace {

constexpr int kDepthMax = 4096;

const UringEngineOptions& checked(const UringEngineOptions& options) {
  if (options.depth < 1 || options.depth > kDepthMax || options.piece < 1_B ||
      options.piece > 1_GiB || options.queue_max < 1) {
    throw UsageError(fmt::format(
        "an io_uring engine needs a depth of 1 to {}, pieces of 1 byte to 1 GiB and a queue of at "
        "least one: depth={} piece={} queue_max={}",
        kDepthMax, options.depth, options.piece.value, options.queue_max));
  }
  return options;
}

}  // namespace

class UringEngine::Core {
 public:
  Core(const UringEngineOptions& options, std::unique_ptr<RequestRing> ring)
      : queue_max_(static_cast<std::size_t>(options.queue_max)),
        ring_(std::move(ring)),
        regions_(*ring_),
        slots_(static_cast<std::size_t>(options.depth)) {
    for (std::size_t i = slots_.size(); i > 0; --i) free_.push_back(i - 1);
    std::promise<void> begun;
    std::future<void> outcome = begun.get_future();
    thread_ = std::thread([this, &begun] { serve(begun); });
    try {
      outcome.get();
    } catch (...) {
      thread_.join();
      throw;
    }
  }
  ~Core() { stop(); }
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  void enqueue(const std::shared_ptr<TransferJob>& job) {
    std::unique_lock lock(mutex_);
    room_.wait(lock, [this] { return queue_.size() < queue_max_ || ended_; });
    if (ended_) return drop(*job);
    queue_.push_back(job);
    if (std::exchange(wants_work_, false)) ring_->wake();
  }

  // On the engine's thread. False: it has ended.
  bool call(std::function<void(RegisteredRegions&)> action) {
    std::future<bool> done;
    {
      const std::lock_guard lock(mutex_);
      if (ended_) return false;
      commands_.push_back({std::move(action), {}});
      done = commands_.back().done.get_future();
      ring_->wake();
    }
    return done.get();
  }

  // Finishes what was given. Called once more it does nothing.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      if (!ended_) ring_->wake();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  // A piece under way.
  struct Slot {
    std::shared_ptr<TransferJob> job;  // null: the slot is free
    std::optional<TransferJob::Piece> piece;
    PendingRange::Call call{};
  };
  struct Command {
    std::function<void(RegisteredRegions&)> action;
    std::promise<bool> done;  // whether it was done
  };

  void serve(std::promise<void>& begun) {
    try {
      ring_->begin();
    } catch (...) {
      begun.set_exception(std::current_exception());
      return;
    }
    begun.set_value();
    try {
      std::vector<RequestRing::Result> results;
      while (fill()) {
        results.clear();
        ring_->wait(results);
        for (const RequestRing::Result& result : results) take(result);
      }
    } catch (...) {
      fail(std::current_exception());
    }
  }

  // Gives free slots to the pieces that come next. False: all is done, and the engine shall end.
  bool fill() {
    std::unique_lock lock(mutex_);
    while (!commands_.empty()) {
      Command command = std::move(commands_.front());
      commands_.pop_front();
      lock.unlock();
      command.action(regions_);
      command.done.set_value(true);
      lock.lock();
    }
    while (!free_.empty() && !queue_.empty()) {
      const std::shared_ptr<TransferJob> job = queue_.front();
      std::optional<TransferJob::Piece> piece = job->claim();
      if (!piece || piece->is_last) {
        queue_.pop_front();
        room_.notify_one();
      }
      if (!piece) continue;
      const std::size_t index = free_.back();
      free_.pop_back();
      slots_[index] = {job, std::move(piece), {}};
      issue(index);
    }
    wants_work_ = !free_.empty();
    ended_ = stopping_ && queue_.empty() && free_.size() == slots_.size();
    return !ended_;
  }

  void issue(std::size_t index) {
    Slot& slot = slots_[index];
    const PendingRange& range = slot.piece->range;
    slot.call = range.next_call();
    const std::byte* const memory = range.reading() ? range.target() : range.source();
    ring_->push({.id = static_cast<std::uint32_t>(index),
                 .fd = slot.call.fd,
                 .offset = slot.call.offset,
                 .bytes = slot.call.bytes,
                 .target = range.target(),
                 .source = range.source(),
                 .region = regions_.find(memory, slot.call.bytes),
                 .may_block = !slot.call.direct || range.told_to_wait()});
  }

  void take(const RequestRing::Result& result) {
    Slot& slot = slots_[result.id];
    STRATA_ASSERT(slot.job != nullptr);
    try {
      slot.piece->range.accept(slot.call, result.value);
    } catch (const IoError&) {
      return settle(result.id, std::current_exception());
    }
    if (slot.piece->range.complete()) return settle(result.id, nullptr);
    issue(result.id);
  }

  void settle(std::size_t index, std::exception_ptr error) {
    Slot& slot = slots_[index];
    slot.job->settle(slot.piece->index, std::move(error));
    slot.job = nullptr;
    free_.push_back(index);
  }

  // The ring serves no more. The transfers fail only after the system has stopped using their
  // memory.
  void fail(const std::exception_ptr& error) {
    ring_->withdraw();
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].job != nullptr) settle(i, error);
    }
    const std::lock_guard lock(mutex_);
    ended_ = true;
    failure_ = error;
    for (const auto& job : queue_) drop(*job);
    queue_.clear();
    for (Command& command : commands_) command.done.set_value(false);
    commands_.clear();
    room_.notify_all();
  }

  void drop(TransferJob& job) {
    STRATA_ASSERT(failure_ != nullptr);
    if (const auto piece = job.claim()) job.settle(piece->index, failure_);
  }

  const std::size_t queue_max_;
  const std::unique_ptr<RequestRing> ring_;
  // Only the engine's thread uses regions_, slots_ and free_.
  RegisteredRegions regions_;
  std::vector<Slot> slots_;
  std::vector<std::size_t> free_;

  std::mutex mutex_;  // of all below, but the thread
  std::condition_variable room_;
  std::deque<std::shared_ptr<TransferJob>> queue_;
  std::deque<Command> commands_;
  bool wants_work_ = false;  // slots are free, and the thread sleeps or is about to
  bool stopping_ = false;
  bool ended_ = false;
  std::exception_ptr failure_;
  std::thread thread_;
};

class UringEngine::Registration final : public MemoryRegistration {
 public:
  Registration(std::weak_ptr<Core> core, std::span<std::byte> memory)
      : MemoryRegistration({}), core_(std::move(core)), memory_(memory) {}
  ~Registration() override {
    const std::shared_ptr<Core> core = core_.lock();
    if (core == nullptr) return;
    core->call([this](RegisteredRegions& regions) { regions.remove(memory_); });
  }

 private:
  std::weak_ptr<Core> core_;
  std::span<std::byte> memory_;
};

UringEngine::UringEngine(const UringEngineOptions& options)
    : UringEngine(options, make_kernel_ring) {}

UringEngine::UringEngine(const UringEngineOptions& options, const RingMaker& make_ring)
    : options_(checked(options)),
      core_(std::make_shared<Core>(options, make_ring(options.depth))) {}

UringEngine::~UringEngine() {
  core_->stop();
}

std::unique_ptr<Transfer> UringEngine::start(const PendingRange& range) {
  auto job = std::make_shared<TransferJob>(range, options_.piece);
  if (!range.complete()) core_->enqueue(job);
  return transfer_of(std::move(job));
}

std::unique_ptr<Transfer> UringEngine::read(const File& file, Bytes offset,
                                            std::span<std::byte> target) {
  return start(PendingRange::reading(file, offset, target));
}

std::unique_ptr<Transfer> UringEngine::write(const File& file, Bytes offset,
                                             std::span<const std::byte> source) {
  return start(PendingRange::writing(file, offset, source));
}

std::unique_ptr<MemoryRegistration> UringEngine::register_memory(std::span<std::byte> memory) {
  std::string refused;
  const bool done = core_->call([&](RegisteredRegions& regions) { refused = regions.add(memory); });
  if (!done) refused = "the kernel no longer serves the queue";
  if (!refused.empty()) return std::make_unique<MemoryRegistration>(std::move(refused));
  return std::make_unique<Registration>(core_, memory);
}

std::optional<EngineKind> engine_kind_from(std::string_view name) {
  if (name == "auto") return EngineKind::kAuto;
  if (name == "io_uring") return EngineKind::kUring;
  if (name == "threads") return EngineKind::kThreads;
  return std::nullopt;
}

ChosenEngine make_io_engine(const EngineOptions& options) {
  return make_io_engine(options, make_kernel_ring);
}

ChosenEngine make_io_engine(const EngineOptions& options, const RingMaker& make_ring) {
  ChosenEngine chosen;
  if (options.kind != EngineKind::kThreads) {
    const UringEngineOptions uring{.piece = options.piece, .depth = options.depth};
    try {
      chosen.engine = std::make_unique<UringEngine>(uring, make_ring);
      return chosen;
    } catch (const IoError& error) {
      if (options.kind == EngineKind::kUring) throw;
      chosen.refused = error.what();
    }
  }
  chosen.engine = std::make_unique<ThreadEngine>(
      ThreadEngineOptions{.threads = options.threads, .piece = options.piece});
  return chosen;
}

}  // namespace strata::io

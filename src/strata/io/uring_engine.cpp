#include "strata/io/uring_engine.h"

#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <future>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "strata/base/error.h"
#include "strata/base/file_descriptor.h"
#include "strata/io/pending_range.h"
#include "strata/io/thread_engine.h"

namespace strata::io {
namespace {

constexpr std::uint64_t kWakeId = ~std::uint64_t{0};
constexpr int kRegions = 1024;
// The kernel may have no memory for requests at a moment. So long, and then it is an error.
constexpr auto kPause = std::chrono::milliseconds(1);
constexpr int kPausesMax = 10'000;

const char* likely_reason(int code) {
  switch (code) {
    case EPERM:
    case EACCES:
      return "a container's seccomp profile or the sysctl kernel.io_uring_disabled forbids it";
    case ENOSYS:
      return "the kernel is older than 5.1, or a container's seccomp profile hides it";
    case EINVAL:
      return "the kernel is older than 5.10";
    case ENOMEM:
      return "the limit of locked memory (ulimit -l) is too small for its queues";
    default:
      return "the system does not say why";
  }
}

[[noreturn]] void refuse(int code) {
  throw IoError("the kernel refuses io_uring: {}: {}", likely_reason(code), errno_text(code));
}

class KernelRing final : public RequestRing {
 public:
  explicit KernelRing(int depth) : wakes_(::eventfd(0, EFD_CLOEXEC)) {
    if (!wakes_.valid()) refuse(errno);
    const int code = open(static_cast<unsigned>(depth) + 1);  // one that waits for wake()
    if (code != 0) refuse(code);
    has_regions_ = ::io_uring_register_buffers_sparse(&ring_, kRegions) == 0;
  }
  ~KernelRing() override { ::io_uring_queue_exit(&ring_); }

  void begin() override {
    int code = ::io_uring_enable_rings(&ring_);
    if (code < 0) refuse(-code);
    read_wakes();
    code = ::io_uring_submit(&ring_);
    if (code < 0) refuse(-code);
  }

  void push(const Request& request) override {
    io_uring_sqe& entry = next();
    const auto bytes = static_cast<unsigned>(request.bytes);
    const auto offset = static_cast<std::uint64_t>(request.offset.value);
    if (request.target != nullptr && request.region >= 0) {
      ::io_uring_prep_read_fixed(&entry, request.fd, request.target, bytes, offset, request.region);
    } else if (request.target != nullptr) {
      ::io_uring_prep_read(&entry, request.fd, request.target, bytes, offset);
    } else if (request.region >= 0) {
      ::io_uring_prep_write_fixed(&entry, request.fd, request.source, bytes, offset,
                                  request.region);
    } else {
      ::io_uring_prep_write(&entry, request.fd, request.source, bytes, offset);
    }
    ::io_uring_sqe_set_data64(&entry, request.id);
    if (request.may_block) ::io_uring_sqe_set_flags(&entry, IOSQE_ASYNC);
    ++pushed_;
  }

  void wait(std::vector<Result>& results) override {
    for (int pauses = 0; pauses < kPausesMax;) {
      const int code = ::io_uring_submit_and_wait(&ring_, 1);
      if (reap(results)) return;
      if (code >= 0 || code == -EINTR) continue;
      if (code != -EAGAIN && code != -EBUSY) fail(-code);
      ::io_uring_get_events(&ring_);
      if (reap(results)) return;
      std::this_thread::sleep_for(kPause);
      ++pauses;
    }
    fail(EAGAIN);
  }

  void withdraw() noexcept override {
    io_uring_sync_cancel_reg all{};
    all.flags = IORING_ASYNC_CANCEL_ALL | IORING_ASYNC_CANCEL_ANY;
    all.timeout.tv_sec = all.timeout.tv_nsec = -1;
    // Kernels older than 6.0 cannot; transfers end by themselves then.
    if (under_way() > 0) ::io_uring_register_sync_cancel(&ring_, &all);
    wake();  // so that one request ends, and the first call does not block where others have ended
    std::vector<Result> dropped;
    for (;;) {
      reap(dropped);
      if (under_way() == 0) return;
      io_uring_cqe* entry = nullptr;
      const int code = ::io_uring_wait_cqe(&ring_, &entry);  // hands nothing over
      const bool served = code == 0 || code == -EINTR || code == -EAGAIN || code == -EBUSY;
      // Without an answer the kernel may still write the requests' memory at any time, so no other
      // code may get that memory.
      STRATA_ASSERT(served);
      if (code != 0) std::this_thread::sleep_for(kPause);
    }
  }

  void wake() override {
    const std::uint64_t one = 1;
    while (::write(wakes_.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  int register_region(int region, std::span<std::byte> memory) override {
    return set_region(region, memory);
  }
  void unregister_region(int region) override { set_region(region, {}); }
  int regions_max() const override { return has_regions_ ? kRegions : 0; }

 private:
  io_uring_sqe& next() {
    io_uring_sqe* const entry = ::io_uring_get_sqe(&ring_);
    STRATA_ASSERT(entry != nullptr);
    return *entry;
  }

  // Requests on a file that the kernel has, and has not told the end of.
  unsigned under_way() const {
    unsigned waiting = 0;  // in the queue, of which the kernel knows nothing
    for (unsigned at = *ring_.sq.khead; at != ring_.sq.sqe_tail; ++at) {
      if (ring_.sq.sqes[at & *ring_.sq.kring_mask].user_data != kWakeId) ++waiting;
    }
    return pushed_ - waiting;
  }

  // Returns 0 or an errno.
  int set_region(int region, std::span<std::byte> memory) {
    const iovec place{memory.data(), memory.size()};
    const int code = ::io_uring_register_buffers_update_tag(&ring_, static_cast<unsigned>(region),
                                                            &place, nullptr, 1);
    return code < 0 ? -code : 0;
  }

  // Returns 0 or an errno. Older kernels know fewer flags.
  int open(unsigned entries) {
    constexpr unsigned kDisabled = IORING_SETUP_R_DISABLED;  // until the thread that uses it begins
    constexpr unsigned kSubmitAll = kDisabled | IORING_SETUP_SUBMIT_ALL;
    constexpr std::array kFlags{
        kSubmitAll | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, kSubmitAll,
        kDisabled};
    int code = 0;
    for (const unsigned flags : kFlags) {
      code = -::io_uring_queue_init(entries, &ring_, flags);
      if (code != EINVAL) break;
    }
    return code;
  }

  void read_wakes() {
    io_uring_sqe& entry = next();
    ::io_uring_prep_read(&entry, wakes_.get(), &woken_, sizeof woken_, 0);
    ::io_uring_sqe_set_data64(&entry, kWakeId);
  }

  // Whether anything has ended.
  bool reap(std::vector<Result>& results) {
    unsigned head = 0;
    unsigned count = 0;
    bool woken = false;
    io_uring_cqe* entry = nullptr;
    io_uring_for_each_cqe(&ring_, head, entry) {
      ++count;
      if (entry->user_data == kWakeId) {
        woken = true;
      } else {
        --pushed_;
        results.push_back({static_cast<std::uint32_t>(entry->user_data), entry->res});
      }
    }
    ::io_uring_cq_advance(&ring_, count);
    if (woken) read_wakes();
    return count > 0;
  }

  [[noreturn]] static void fail(int code) {
    throw IoError("the kernel no longer serves io_uring's queue: {}", errno_text(code));
  }

  FileDescriptor wakes_;
  std::uint64_t woken_ = 0;  // the kernel writes it
  io_uring ring_{};
  unsigned pushed_ = 0;  // requests on files that have not ended
  bool has_regions_ = false;
};

constexpr int kDepthMax = 4096;

void require_possible(const EngineOptions& options) {
  if (options.depth < 1 || options.depth > kDepthMax || options.piece < 1_B ||
      options.piece > 1_GiB || options.queue_max < 1) {
    throw UsageError(
        "an io_uring engine needs a depth of 1 to {}, pieces of 1 byte to 1 GiB and a queue of at "
        "least one: depth={} piece={} queue_max={}",
        kDepthMax, options.depth, options.piece.value, options.queue_max);
  }
}

std::uintptr_t address_of(const std::byte* memory) {
  return reinterpret_cast<std::uintptr_t>(memory);
}

std::string refusal(int code, std::size_t bytes) {
  if (code != ENOMEM) return fmt::format("the kernel does not register it: {}", errno_text(code));
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  return fmt::format(
      "registered memory counts as locked, and the limit is too small: raise it (ulimit -l): "
      "wanted={} limit={} {}",
      bytes, limit.rlim_cur, errno_text(code));
}

// The memory that an engine has registered with its ring: spans, cut into regions of the size that
// a ring takes. Finds the region in which a request lies. Threads: one, the ring's. Ownership:
// borrows the ring and the memory. Errors: texts, since transfers work with unregistered memory,
// too.
class RegisteredRegions {
 public:
  explicit RegisteredRegions(RequestRing& ring) : ring_(ring) {
    for (int number = ring.regions_max(); number > 0; --number) free_.push_back(number - 1);
  }

  // Returns the reason why the memory is not registered; empty: it is.
  std::string add(std::span<std::byte> memory) {
    if (memory.empty()) return "there is none";
    if (overlaps(memory)) return "some of it is registered already";
    if (ring_.regions_max() == 0) return "the kernel is older than 5.19";
    for (std::size_t at = 0; at < memory.size();) {
      const std::span part =
          memory.subspan(at, std::min(memory.size() - at, RequestRing::kRegionMax.size()));
      const int code = free_.empty() ? ENOSPC : ring_.register_region(free_.back(), part);
      if (code != 0) {
        remove(memory.first(at));
        return refusal(code, memory.size());
      }
      by_begin_[address_of(part.data())] = {address_of(part.data()) + part.size(), free_.back()};
      free_.pop_back();
      at += part.size();
    }
    return {};
  }
  // Unregisters memory that add() has registered.
  void remove(std::span<std::byte> memory) {
    const std::uintptr_t end = address_of(memory.data()) + memory.size();
    auto region = by_begin_.lower_bound(address_of(memory.data()));
    while (region != by_begin_.end() && region->first < end) {
      ring_.unregister_region(region->second.number);
      free_.push_back(region->second.number);
      region = by_begin_.erase(region);
    }
  }
  // The region that holds all of these bytes; -1: there is none.
  int find(const std::byte* memory, std::size_t bytes) const {
    auto region = by_begin_.upper_bound(address_of(memory));
    if (region == by_begin_.begin()) return -1;
    --region;
    return address_of(memory) + bytes <= region->second.end ? region->second.number : -1;
  }

 private:
  struct Region {
    std::uintptr_t end;
    int number;
  };
  bool overlaps(std::span<const std::byte> memory) const {
    auto after = by_begin_.lower_bound(address_of(memory.data()) + memory.size());
    return after != by_begin_.begin() && std::prev(after)->second.end > address_of(memory.data());
  }

  RequestRing& ring_;
  std::vector<int> free_;
  std::map<std::uintptr_t, Region> by_begin_;
};

class RingCore : NonCopyable {
 public:
  RingCore(const EngineOptions& options, std::unique_ptr<RequestRing> ring)
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
  ~RingCore() { stop(); }

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

class RingRegistration final : public MemoryRegistration {
 public:
  RingRegistration(std::weak_ptr<RingCore> core, std::span<std::byte> memory)
      : MemoryRegistration({}), core_(std::move(core)), memory_(memory) {}
  ~RingRegistration() override {
    const std::shared_ptr<RingCore> core = core_.lock();
    if (core == nullptr) return;
    core->call([this](RegisteredRegions& regions) { regions.remove(memory_); });
  }

 private:
  std::weak_ptr<RingCore> core_;
  std::span<std::byte> memory_;
};

class UringEngine final : public JobEngine {
 public:
  UringEngine(const EngineOptions& options, std::unique_ptr<RequestRing> ring)
      : JobEngine(options.piece), core_(std::make_shared<RingCore>(options, std::move(ring))) {}
  ~UringEngine() override { core_->stop(); }

  std::string_view name() const override { return "io_uring"; }
  std::unique_ptr<MemoryRegistration> register_memory(std::span<std::byte> memory) override {
    std::string refused;
    const bool done =
        core_->call([&](RegisteredRegions& regions) { refused = regions.add(memory); });
    if (!done) refused = "the kernel no longer serves the queue";
    if (!refused.empty()) return std::make_unique<MemoryRegistration>(std::move(refused));
    return std::make_unique<RingRegistration>(core_, memory);
  }

 private:
  void enqueue(const std::shared_ptr<TransferJob>& job) override { core_->enqueue(job); }

  std::shared_ptr<RingCore> core_;
};

}  // namespace

std::unique_ptr<RequestRing> make_kernel_ring(int depth) {
  return std::make_unique<KernelRing>(depth);
}

std::unique_ptr<IoEngine> make_uring_engine(const EngineOptions& options,
                                            const RingMaker& make_ring) {
  require_possible(options);
  return std::make_unique<UringEngine>(options, make_ring(options.depth));
}

ChosenEngine make_io_engine(const EngineOptions& options, const RingMaker& make_ring) {
  ChosenEngine chosen;
  if (options.kind != EngineKind::kThreads) {
    try {
      chosen.engine = make_uring_engine(options, make_ring ? make_ring : make_kernel_ring);
      return chosen;
    } catch (const IoError& error) {
      if (options.kind == EngineKind::kUring) throw;
      chosen.refused = error.what();
    }
  }
  chosen.engine = std::make_unique<ThreadEngine>(options);
  return chosen;
}

}  // namespace strata::io

// The streams of a LateDevice: each runs its work in a thread of its own, in order, at a pace that
// a pseudo-random sequence gives, some time after the call that queued it.
//
// A race detector must see the order between streams that events make, and no other. So nothing
// here lets a thread that queues work know, even by a lock, how far the thread that runs it has
// come: queues have no locks, the system wakes sleepers, and memory that the two share is freed at
// the end only. Threads: Stream's; LateChip is internally synchronised. Ownership: all objects of a
// device share its LateChip, which may outlive the device; it ends with its last owner, after all
// work is done. Errors: work that throws ends the program.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "strata/device/cpu_device.h"

namespace strata::device {

// `hands` are those of the stream that runs it: kernels of the CPU, in the thread that calls.
using LateTask = std::function<void(CpuDevice& hands)>;

// A point of a stream, reached or not yet.
class LatePoint {
 public:
  void reach();
  bool reached() const { return reached_.load(std::memory_order_acquire) != 0; }
  void wait();
  std::chrono::steady_clock::time_point time() const { return time_; }  // once it is reached

 private:
  std::chrono::steady_clock::time_point time_;
  std::atomic<std::uint32_t> reached_ = 0;
};

// A queue and the thread that empties it. One thread at a time pushes.
class LateWorker {
 public:
  explicit LateWorker(std::uint64_t seed);
  ~LateWorker();  // runs the pushed tasks
  LateWorker(const LateWorker&) = delete;
  LateWorker& operator=(const LateWorker&) = delete;

  void push(LateTask task);

 private:
  struct Node {
    LateTask task;  // null: the end
    std::atomic<Node*> next = nullptr;
  };
  void run();
  Node* take();
  void dawdle();

  std::mt19937_64 random_;
  std::uint64_t pace_ = 0;  // turns that are left to others before each task
  int until_change_ = 0;    // tasks of this pace
  CpuDevice hands_;
  Node* last_;   // of the thread that pushes
  Node* first_;  // of the thread that runs: the task that ran last
  std::atomic<std::uint32_t> pushed_ = 0;
  std::thread thread_;
};

// The memory that streams reach; all LateDevices of the process share it, as a driver's knowledge.
class LateMemoryMap {
 public:
  enum class Reach { kDevice, kPinned, kOrdinary };

  static LateMemoryMap& of_process();
  void add(std::span<const std::byte> memory, Reach reach);
  void forget(std::span<const std::byte> memory);
  Reach reach_of(const void* pointer) const;

 private:
  struct Range {
    const std::byte* end = nullptr;
    Reach reach = Reach::kOrdinary;
  };
  mutable std::mutex mutex_;
  std::map<const std::byte*, Range> ranges_;  // by their begin
};

class LateChip {
 public:
  LateChip(std::uint64_t seed, std::shared_ptr<HostWaits> waits)
      : waits_(std::move(waits)), seed_(seed) {}

  HostWaits& waits() { return *waits_; }
  LatePoint& make_point();
  std::unique_ptr<LateWorker> make_worker();
  // Takes the worker of a stream that has ended; its work runs on, and no call waits for it.
  void retire(std::unique_ptr<LateWorker> worker);

 private:
  std::shared_ptr<HostWaits> waits_;
  std::mutex mutex_;
  std::uint64_t seed_;
  std::deque<LatePoint> points_;
  std::vector<std::unique_ptr<LateWorker>> retired_;
};

class LateStream : public Stream {
 public:
  explicit LateStream(std::shared_ptr<LateChip> chip);
  ~LateStream() override;
  LateStream(const LateStream&) = delete;
  LateStream& operator=(const LateStream&) = delete;

  void push(LateTask task) { worker_->push(std::move(task)); }
  // As synchronize(), but not counted as a host wait.
  void finish();
  std::unique_ptr<Event> record() override;
  std::unique_ptr<TimedEvent> record_timed() override;
  void wait_for(Event& event) override;
  void synchronize() override;

 private:
  std::shared_ptr<LateChip> chip_;
  std::unique_ptr<LateWorker> worker_;
};

// Returns when *flag has reached `value`. A write through this device wakes the sleeper; a write by
// the host, which is allowed, too, does not.
void await_flag(const Flag& flag, std::uint32_t value);
void raise_flag(Flag& flag, std::uint32_t value);

}  // namespace strata::device

// The part of a step's update that a rank's processors do, in host memory, beside the device and
// without a wait of the engine. Bits do not depend on it: the kernels of host and device agree.
// Jobs run in the order in which they come. Weights that lie on the device come to a ring of pinned
// memory some jobs before their update, and go back after it.
//
// Threads: one of its own, with a pool; it also queues those copies, since a stream that waits for
// a thread delays others. Calls come from one thread at a time. The compute stream waits for a
// count of ended jobs. Ownership: borrows the device and the watch; the memory of a job stays until
// it has ended. Errors: OutOfMemoryError from the constructor. After an error no later job does
// anything, but each still ends, so that nothing waits for ever; throw_failure() throws the error.
#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/interface.h"
#include "strata/base/thread_pool.h"
#include "strata/device/device.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/kernels/adam.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

// Elements that a lane has updated, and its seconds for them.
struct LaneTime {
  Numel numel;
  double seconds = 0.0;
};

class HostLane : NonCopyable {
 public:
  // `largest`: bytes of weights on the device that a job takes, at most.
  HostLane(device::Device& device, offload::LinkWatch& watch, const UpdateLanes& lanes,
           Bytes largest);
  ~HostLane();

  // A step begins. Its jobs run after what the compute stream holds now, and with the factor of
  // gradients that `factor` gives then, in the lane's thread. NaN: they change nothing.
  void begin(std::function<float()> factor);
  // Where the host will find the weights of the next job, which are `weights` on the device.
  std::span<std::byte> room_for(std::span<const std::byte> weights);
  struct Run {
    kernels::AdamSpans spans;
    kernels::AdamScalars scalars;
  };
  // Queues a job. `weights`: those of room_for(); empty: they are on the host. The leases may be
  // returned then.
  void update(std::vector<Run> runs, std::span<std::byte> weights,
              std::span<offload::Lease* const> leases);
  // Jobs that have not ended.
  std::uint32_t pending() const { return pushed_ - flag_.load(std::memory_order_relaxed); }
  // When the jobs of now have ended.
  std::unique_ptr<device::Event> ended();
  // Work that the compute stream gets from here on finds all jobs done.
  void join();
  // Throws the first error of a job, once; with `waits` after all have ended.
  void throw_failure(bool waits);
  // The last finished step's.
  LaneTime time() const { return time_; }

 private:
  // A step's beginning, or a job.
  struct Work {
    std::function<void()> begin;  // null: a job
    std::vector<Run> runs;
    std::span<std::byte> weights;
    std::size_t slot = 0;                    // of these weights
    std::shared_ptr<device::Event> brought;  // null: not on their way yet
    bool last = false;                       // the thread ends
  };
  static constexpr std::size_t kSlots = 8;

  std::span<std::byte> slot(std::size_t index, std::size_t bytes) const {
    return memory_->bytes().subspan(kFlagRoom.size() + index * slot_room_.size(), bytes);
  }
  void push(Work work);
  void run();
  void bring_next();
  void do_job(Work& job);
  void signal(std::uint32_t ended, bool failed) noexcept;

  static constexpr Bytes kFlagRoom = 4_KiB;
  device::Device& device_;
  offload::LinkWatch& watch_;
  const UpdateLanes lanes_;
  const Bytes slot_room_;
  std::unique_ptr<device::HostMemory> memory_;  // the flag, and the ring
  device::Flag& flag_;                          // ended jobs
  std::unique_ptr<device::Stream> gate_;        // waits for the flag
  std::uint32_t pushed_ = 0;                    // jobs
  std::size_t next_slot_ = 0;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;  // guarded; the first one is being done
  FirstError error_;       // guarded

  // The thread's, but for its start and while work_ is empty.
  std::unique_ptr<device::Stream> down_;
  std::unique_ptr<device::Stream> up_;
  std::array<std::unique_ptr<device::Event>, kSlots> back_;  // of slots; null: never used
  std::unique_ptr<ThreadPool> pool_;                         // null: no job yet
  float factor_ = 1.0F;
  double began_ = 0.0;
  LaneTime time_;
  std::thread thread_;
};

// Deals the parts of an update to two lanes, so that they end together if each is as fast as in the
// steps before. After some steps it tries each lane alone, since one may slow the other down, and
// then stays with the fastest way. Its choice changes no bit. Threads: one at a time. Errors: none.
class LaneDealer {
 public:
  explicit LaneDealer(const UpdateLanes& lanes) : which_(lanes.which) {
    if (lanes.seed) random_.emplace(*lanes.seed);
  }
  void begin_step() { dealt_ = {}; }
  // Whether the host takes the next part.
  bool to_host(Numel part) {
    if (random_) return (*random_)() % 2 == 0;
    if (which_ != UpdateLanes::Which::kAuto) return which_ == UpdateLanes::Which::kHost;
    if (way_ != kBoth) return way_ == kHost;
    std::array<double, 2> ends = dealt_;
    for (std::size_t lane = 0; lane < 2; ++lane)
      ends[lane] += static_cast<double>(part.value) / speeds_[lane];
    const std::size_t chosen = ends[kHost] < ends[kDevice] ? kHost : kDevice;
    dealt_[chosen] = ends[chosen];
    return chosen == kHost;
  }
  // The times of the last step.
  void learn(LaneTime host, LaneTime device) {
    const std::array<LaneTime, 2> times = {device, host};
    double all = 0.0;
    for (std::size_t lane = 0; lane < 2; ++lane) {
      if (times[lane].numel.value == 0 || times[lane].seconds <= 0.0) continue;
      all = std::max(all, times[lane].seconds);
      const double seen = static_cast<double>(times[lane].numel.value) / times[lane].seconds;
      if (way_ == kBoth) speeds_[lane] = (speeds_[lane] + seen) / 2;
    }
    seconds_[way_] = all;
    if (++steps_ == kTries)
      way_ = kHost;
    else if (steps_ == kTries + 1)
      way_ = kDevice;
    else if (steps_ == kTries + 2)
      way_ = static_cast<std::size_t>(std::ranges::min_element(seconds_) - seconds_.begin());
  }

 private:
  static constexpr std::size_t kDevice = 0;
  static constexpr std::size_t kHost = 1;
  static constexpr std::size_t kBoth = 2;
  static constexpr int kTries = 4;       // of both lanes
  static constexpr double kGuess = 2e9;  // elements a second, until something is learned

  UpdateLanes::Which which_;
  std::optional<std::mt19937_64> random_;
  std::array<double, 2> speeds_{kGuess, kGuess};
  std::array<double, 2> dealt_{};    // seconds of work that each has got in this step
  std::array<double, 3> seconds_{};  // of a step, by way
  std::size_t way_ = kBoth;
  int steps_ = 0;
};

}  // namespace strata::engine

// The part of a step's update that a rank's processors do, where states rest in host memory, beside
// the device and without a wait of the engine. Weights of the device come to a ring of pinned
// memory for it, and go back. Bits do not depend on it: the kernels of host and device agree. Jobs
// run in the order in which they come.
//
// Threads: one of its own, with a pool, which never calls the driver: the device's streams and this
// thread wait for each other by counts in pinned memory. So a call of the driver that waits for the
// device does not keep the thread from its work. The calls come from one thread at a time.
// Ownership: borrows the device and the watch; the memory of a job stays until it has ended.
// Errors: OutOfMemoryError from the constructor. After an error no later job of the step does
// anything, but each still ends, so that nothing waits for ever; throw_failure() throws the error.
#pragma once

#include <array>
#include <atomic>
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
#include "strata/engine/record/step_report.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/kernels/adam.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

class HostLane : NonCopyable {
 public:
  // Weights that rest on the device, of which it may update parts: the bytes of the largest part,
  // and the number of parts.
  struct Weights {
    Bytes largest;
    std::int64_t parts = 0;
  };
  HostLane(device::Device& device, offload::LinkWatch& watch, const UpdateLanes& lanes,
           const Weights& weights);
  ~HostLane();

  // The next begin() waits for this, too.
  void wait_for(device::Event& event) { coming_->wait_for(event); }
  // A step begins. Its jobs run after what the compute stream holds now, and with the factor of
  // gradients that `factor` gives then, in the lane's thread. NaN: they change nothing.
  void begin(std::function<float()> factor);
  // Copies weights of the device for the next job, which works on the result instead. They go back
  // when it has ended.
  std::span<std::byte> bring(std::span<std::byte> weights);
  struct Run {
    kernels::AdamSpans spans;
    kernels::AdamScalars scalars;
  };
  // Queues a job.
  void update(std::vector<Run> runs);
  // Work in this stream waits for all jobs of now.
  device::Stream& stream() { return *gate_; }
  // Throws the first error of a job, or of a lost device, once; with `waits` after all have ended.
  void throw_failure(bool waits);
  // The last finished step's.
  LaneTime time() const { return time_; }

 private:
  // A step's beginning, or a job.
  struct Work {
    std::function<float()> factor;  // null: a job
    std::vector<Run> runs;
    std::uint32_t after = 0;  // value of arrived_
    bool last = false;        // the thread ends
  };
  // A part of the ring.
  struct Place {
    std::span<std::byte> bytes;
    std::span<std::byte> from;                 // on the device
    std::unique_ptr<device::Event> free = {};  // null: not used yet
  };
  void push(Work work);
  void run();
  void do_work(Work& work);

  device::Device& device_;
  offload::LinkWatch& watch_;
  const UpdateLanes lanes_;
  std::unique_ptr<device::HostMemory> memory_;  // the counts
  std::unique_ptr<device::HostMemory> ring_;    // null: no weights come
  device::Flag& ended_;                         // jobs
  device::Flag& arrived_;                       // of what jobs wait for; the device counts it
  std::unique_ptr<device::Stream> gate_;        // waits for jobs, and brings weights back
  std::unique_ptr<device::Stream> coming_;      // counts, and brings weights
  std::atomic<bool> device_lost_ = false;
  std::uint32_t pushed_ = 0;        // jobs
  std::uint32_t coming_count_ = 0;  // the value of arrived_ when all has arrived
  std::vector<Place> places_;
  std::size_t next_ = 0;
  Place* brought_ = nullptr;  // for the next job

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;  // guarded; the first one is being done
  FirstError error_;       // guarded

  // The thread's, but while work_ is empty.
  std::unique_ptr<ThreadPool> pool_;  // null: no job yet
  float factor_ = 1.0F;
  double began_ = 0.0;
  LaneTime time_;
  std::thread thread_;
};

// Deals the parts of an update to two lanes, so that they end together if each is as fast as in the
// steps before. Its choice changes no bit. Threads: one at a time. Errors: none.
class LaneDealer {
 public:
  explicit LaneDealer(const UpdateLanes& lanes) : which_(lanes.which) {
    if (lanes.seed) random_.emplace(*lanes.seed);
  }
  void begin_step() { dealt_ = {}; }
  // Whether the host takes the next part.
  bool to_host(Numel part) {
    if (random_) return (*random_)() % 2 == 0;
    if (which_ != UpdateWhere::kAuto) return which_ == UpdateWhere::kHost;
    std::array<double, 2> ends = dealt_;
    for (std::size_t lane = 0; lane < 2; ++lane)
      ends[lane] += static_cast<double>(part.value) / speeds_[lane];
    const std::size_t chosen = ends[kHost] < ends[kDevice] ? kHost : kDevice;
    dealt_[chosen] = ends[chosen];
    return chosen == kHost;
  }
  // The times of the last step.
  void learn(const LaneTimes& of) {
    const std::array<LaneTime, 2> times = {of.device, of.host};
    for (std::size_t lane = 0; lane < 2; ++lane) {
      if (times[lane].numel.value == 0 || times[lane].seconds <= 0.0) continue;
      const double seen = static_cast<double>(times[lane].numel.value) / times[lane].seconds;
      // A lane that ends last is faster alone, so it takes some steps until both end together.
      speeds_[lane] += (seen - speeds_[lane]) * 3 / 4;
    }
  }

 private:
  static constexpr std::size_t kDevice = 0;
  static constexpr std::size_t kHost = 1;
  static constexpr double kGuess = 2e9;  // elements a second, until something is learned

  UpdateWhere which_;
  std::optional<std::mt19937_64> random_;
  std::array<double, 2> speeds_{kGuess, kGuess};
  std::array<double, 2> dealt_{};  // seconds of work that each has got in this step
};

}  // namespace strata::engine

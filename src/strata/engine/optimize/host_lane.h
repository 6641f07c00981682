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

#include <algorithm>
#include <array>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/interface.h"
#include "strata/base/thread_pool.h"
#include "strata/device/device.h"
#include "strata/engine/record/step_report.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/kernels/update.h"
#include "strata/offload/host_memory.h"
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
           const Weights& weights)
      : device_(device),
        watch_(watch),
        lanes_(lanes),
        memory_(offload::pinned_memory(device, 4_KiB, memory::Kind::kStaging)),
        ended_(*new (memory_->bytes().data()) device::Flag(0)),
        arrived_(*new (memory_->bytes().data() + 2048) device::Flag(0)),
        gate_(device.create_stream()),
        coming_(device.create_stream()) {
    if (weights.parts > 0) {
      const std::int64_t count = std::min(kPlaces, weights.parts);
      const Bytes each = align_up(weights.largest, 4_KiB);
      ring_ = offload::pinned_memory(device, each * count, memory::Kind::kStaging);
      for (std::int64_t i = 0; i < count; ++i)
        places_.push_back({ring_->bytes().subspan((each * i).size(), each.size()), {}});
    }
    thread_ = std::thread([this] { run(); });
  }
  ~HostLane() {
    push({{}, {}, 0, /*last=*/true});
    FirstError lost;  // a destructor cannot report it
    lost.attempt([this] { coming_->synchronize(); });
    device_lost_ = lost.get() != nullptr;
    thread_.join();
    lost.attempt([this] { gate_->synchronize(); });
  }

  // The next begin() waits for this, too.
  void wait_for(device::Event& event) { coming_->wait_for(event); }
  // A step begins. Its jobs run after what the compute stream holds now, and with the factor of
  // gradients that `factor` gives then, in the lane's thread. NaN: they change nothing.
  void begin(std::function<float()> factor) {
    coming_->wait_for(*device_.compute_stream().record());
    device_.write_flag(arrived_, ++coming_count_, *coming_);
    push({std::move(factor), {}, coming_count_});
  }
  // Copies weights of the device for the next job, which works on the result instead. They go back
  // when it has ended.
  std::span<std::byte> bring(std::span<std::byte> weights) {
    Place& place = places_[next_++ % places_.size()];
    if (place.free != nullptr) coming_->wait_for(*place.free);
    const std::span<std::byte> here = place.bytes.first(weights.size());
    watch_.copy(offload::Link::kDown, Bytes(here.size()), *coming_,
                [&] { device_.copy(here, weights, *coming_); });
    device_.write_flag(arrived_, ++coming_count_, *coming_);
    place.from = weights;
    brought_ = &place;
    return here;
  }
  struct Run {
    kernels::UpdateSpans spans;
    kernels::UpdateScalars scalars;
  };
  // Queues a job.
  void update(std::vector<Run> runs) {
    push({{}, std::move(runs), coming_count_});
    device_.wait_flag(ended_, ++pushed_, *gate_);
    Place* const place = std::exchange(brought_, nullptr);
    if (place == nullptr) return;
    watch_.copy(offload::Link::kUp, Bytes(place->from.size()), *gate_,
                [&] { device_.copy(place->from, place->bytes.first(place->from.size()), *gate_); });
    place->free = gate_->record();
  }
  // Work in this stream waits for all jobs of now.
  device::Stream& stream() { return *gate_; }
  // Throws the first error of a job, or of a lost device, once; with `waits` after all have ended.
  void throw_failure(bool waits) {
    std::unique_lock lock(mutex_);
    while (waits && !work_.empty()) {
      if (changed_.wait_for(lock, kLookAtDevice) != std::cv_status::timeout) continue;
      FirstError lost;  // apart from a job's error, after which the device goes on
      lost.attempt([this] { coming_->record(); });
      device_lost_ = lost.get() != nullptr;
      error_.keep(lost.get());
    }
    error_.rethrow_once();
  }
  // The last finished step's.
  LaneTime time() const { return time_; }

 private:
  static constexpr auto kLookAtDevice = std::chrono::milliseconds(200);
  // The ring has several, since a stream sees a count some milliseconds late.
  static constexpr std::int64_t kPlaces = 8;
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
  static double now() {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(time).count();
  }
  void push(Work work) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }
  void run() {
    std::fesetenv(FE_DFL_ENV);  // a script's thread may round and flush as it likes
    bind_this_thread(lanes_.cores);
    for (std::uint32_t ended = 0;;) {
      FirstError error;
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !work_.empty(); });
      Work& work = work_.front();
      if (work.last) break;
      lock.unlock();
      while (!device_lost_ &&
             !device::reached(arrived_.load(std::memory_order_acquire), work.after))
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      if (!device_lost_) error.attempt([&] { do_work(work); });
      if (error.get() != nullptr) factor_ = std::nanf("");  // the step's later jobs change nothing
      if (!work.factor) ended_.store(++ended, std::memory_order_release);
      lock.lock();
      error_.keep(error.get());
      work_.pop_front();
      changed_.notify_all();
    }
    pool_.reset();
  }
  void do_work(Work& work) {
    if (work.factor) {
      factor_ = work.factor();
      began_ = now();
      time_ = {};
    }
    if (std::isnan(factor_)) return;
    if (pool_ == nullptr) pool_ = std::make_unique<ThreadPool>(lanes_.threads, lanes_.cores);
    for (Run& run : work.runs) {
      run.scalars.gradient_scale = factor_;
      device_.update_on_host(run.spans, run.scalars, *pool_);
      time_.numel += Numel(static_cast<std::int64_t>(run.spans.numel()));
    }
    time_.seconds = now() - began_;
  }

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

// Devices for tests of the lane in which a rank's processors update: one whose lane a test holds
// back, and one that is lost while the lane waits for it. Threads, ownership: as the devices that
// they derive from. Errors: those that a test's hooks throw; LosableDevice's.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "device/late_device.h"
#include "device/losable_device.h"

namespace strata::engine::fake {

// Threads wait at it while it is closed. Threads: any.
class Gate {
 public:
  void close() { set(true); }
  void open() { set(false); }
  void pass() {
    std::unique_lock lock(mutex_);
    opened_.wait(lock, [this] { return !closed_; });
  }

 private:
  void set(bool closed) {
    const std::lock_guard lock(mutex_);
    closed_ = closed;
    opened_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable opened_;
  bool closed_ = false;
};

// So that an error leaves no thread at the gate.
struct OpensAtEnd {
  Gate& gate;
  ~OpensAtEnd() { gate.open(); }
};

// A late device. Hooks change while its lane has no work; empty ones do nothing.
class LaneDevice final : public device::LateDevice {
 public:
  explicit LaneDevice(int rank) : LateDevice({}, static_cast<std::uint64_t>(rank) * 1000 + 1) {}

  std::function<void()> at_job;  // in the lane's thread, before a job's work
  // In the caller's thread: before a count is queued in a stream, and before an event is recorded
  // in a stream that is not the compute stream. A caller that waits for the lane records one now
  // and then, to see whether the device is lost.
  std::function<void(device::Stream&)> at_count;
  std::function<void()> at_event;

  std::unique_ptr<device::Stream> create_stream() override {
    return std::make_unique<HookedStream>(*this, chip());
  }
  void write_flag(device::Flag& flag, std::uint32_t value, device::Stream& stream) override {
    if (at_count) at_count(stream);
    LateDevice::write_flag(flag, value, stream);
  }
  void update_on_host(const kernels::UpdateSpans& spans, const kernels::UpdateScalars& scalars,
                      ThreadPool& pool) override {
    if (at_job) at_job();
    LateDevice::update_on_host(spans, scalars, pool);
  }

 private:
  class HookedStream final : public device::LateStream {
   public:
    HookedStream(const LaneDevice& device, std::shared_ptr<device::LateChip> chip)
        : LateStream(std::move(chip)), device_(device) {}
    std::unique_ptr<device::Event> record() override {
      if (device_.at_event) device_.at_event();
      return LateStream::record();
    }

   private:
    const LaneDevice& device_;
  };
};

// A device that says that it runs ahead. From a count on that a test chooses, no count of a stream
// arrives, and no stream waits for one, as if all were queued for ever. Its calls fail from lose()
// on.
class StoppingDevice final : public device::LosableDevice {
 public:
  // `lost`: then calls fail at once.
  void stop_after(int counts, bool lost) {
    left_ = counts;
    lost_then_ = lost;
  }

  bool runs_ahead() const override { return true; }
  void write_flag(device::Flag& flag, std::uint32_t value, device::Stream& stream) override {
    stopped_ = stopped_ || left_-- == 0;
    if (stopped_ && lost_then_) lose(true);
    if (!stopped_) CpuDevice::write_flag(flag, value, stream);
  }
  void wait_flag(const device::Flag& flag, std::uint32_t value, device::Stream& stream) override {
    if (!stopped_) CpuDevice::wait_flag(flag, value, stream);
  }

 private:
  int left_ = -1;  // negative: it does not stop
  bool lost_then_ = false;
  bool stopped_ = false;
};

}  // namespace strata::engine::fake

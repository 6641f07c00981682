// A CPU device that says it runs ahead, and fails at a call that a test chooses: once, with the
// error that a device gives. Its streams are in order all the same. Threads: one, except for calls
// that device::CpuDevice allows from several. Errors: DeviceError and OutOfMemoryError that say
// "injected".
#pragma once

#include <memory>
#include <utility>

#include "strata/base/error.h"
#include "strata/device/cpu_device.h"

namespace strata::engine::fake {

// A fault that occurs once, after a given number of successes.
class Fault {
 public:
  void arm(int successes = 0) { left_ = successes; }
  bool due() { return left_ >= 0 && left_-- == 0; }

 private:
  int left_ = -1;
};

class FaultyStream final : public device::Stream {
 public:
  FaultyStream(std::unique_ptr<device::Stream> real, Fault& records)
      : real_(std::move(real)), records_(records) {}

  std::unique_ptr<device::Event> record() override {
    if (records_.due()) throw DeviceError("injected: no event can be recorded");
    return real_->record();
  }
  std::unique_ptr<device::TimedEvent> record_timed() override { return real_->record_timed(); }
  void wait_for(device::Event& event) override { real_->wait_for(event); }
  void synchronize() override { real_->synchronize(); }

 private:
  std::unique_ptr<device::Stream> real_;
  Fault& records_;
};

class FaultyDevice final : public device::CpuDevice {
 public:
  Fault records;      // of events, on any of its streams
  Fault adam_steps;   // segments that an optimizer updates, on the device or on the host
  Fault gathered;     // allocations for gathered weights
  bool ahead = true;  // the value of runs_ahead()

  bool runs_ahead() const override { return ahead; }
  device::Stream& compute_stream() override { return compute_; }
  std::unique_ptr<device::Stream> create_stream() override {
    return std::make_unique<FaultyStream>(CpuDevice::create_stream(), records);
  }
  std::unique_ptr<device::Memory> allocate(Bytes bytes, memory::Kind kind) override {
    if (kind == memory::Kind::kGathered && gathered.due())
      throw OutOfMemoryError("injected: no memory for gathered weights");
    return CpuDevice::allocate(bytes, kind);
  }
  void update_step(const kernels::UpdateSpans& spans, const kernels::UpdateScalars& scalars,
                   device::Stream& stream) override {
    if (adam_steps.due()) throw DeviceError("injected: the kernel was not launched");
    CpuDevice::update_step(spans, scalars, stream);
  }
  void update_on_host(const kernels::UpdateSpans& spans, const kernels::UpdateScalars& scalars,
                      ThreadPool& pool) override {
    if (adam_steps.due()) throw DeviceError("injected: the host cannot update");
    CpuDevice::update_on_host(spans, scalars, pool);
  }

 private:
  FaultyStream compute_{CpuDevice::create_stream(), records};
};

}  // namespace strata::engine::fake

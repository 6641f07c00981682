// The CPU, until it is lost: then nothing can be queued on any of its streams, or waited for, as on
// a GPU after a fault. Threads: as device::CpuDevice; lose() in any. Ownership: it outlives
// its streams. Errors: DeviceError "the device is lost".
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "strata/base/error.h"
#include "strata/device/cpu_device.h"

namespace strata::device {

class LosableDevice : public CpuDevice {
 public:
  Stream& compute_stream() override { return compute_; }
  std::unique_ptr<Stream> create_stream() override {
    return std::make_unique<LosableStream>(lost_, CpuDevice::create_stream());
  }
  void lose(bool lost) { lost_ = lost; }

 private:
  class LosableStream final : public Stream {
   public:
    LosableStream(const std::atomic<bool>& lost, std::unique_ptr<Stream> stream)
        : lost_(lost), stream_(std::move(stream)) {}
    std::unique_ptr<Event> record() override { return here().record(); }
    std::unique_ptr<TimedEvent> record_timed() override { return here().record_timed(); }
    void wait_for(Event& event) override { here().wait_for(event); }
    void synchronize() override { here().synchronize(); }

   private:
    Stream& here() {
      if (lost_) throw DeviceError("the device is lost");
      return *stream_;
    }
    const std::atomic<bool>& lost_;
    const std::unique_ptr<Stream> stream_;
  };

  std::atomic<bool> lost_{false};
  LosableStream compute_{lost_, CpuDevice::create_stream()};
};

}  // namespace strata::device

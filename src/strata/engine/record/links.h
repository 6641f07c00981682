// The links of one rank: lets the recorder see the traffic over them, knows their limits, and makes
// the report of a step. Threads: the engine's, one at a time. Ownership: borrows the device and the
// recorder, which outlive it; keeps the stores. Errors: none; if a limit cannot be measured, as on
// a full drive, it is absent.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "strata/device/device.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/engine/record/step_report.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

struct LinkSpeed {
  double up_gb_per_s = 0.0;  // from the host; 0 where host and device are one
  double down_gb_per_s = 0.0;
};

// From a short measurement: the best of some copies of pinned memory, one way at a time, by the
// device's clock. Takes some hundredths of a second, most of them to pin the memory; the host waits
// for it, and nothing is charged. Copies of other programs at the same time make the result
// smaller. Any thread. Throws OutOfMemoryError, DeviceError.
LinkSpeed measure_link(device::Device& device);

class Links : NonCopyable {
 public:
  // `stores`: may be null. `offloads`: whether any state of the engine rests elsewhere than on the
  // device; otherwise there is nothing to report.
  Links(device::Device& device, std::vector<std::shared_ptr<offload::StateStore>> stores,
        bool offloads, StepRecorder& recorder);
  ~Links();

  // `measure`: the first call measures the limits; the host waits for that for some tenths of a
  // second at most.
  std::optional<LinkReport> report(const StepRecord& record, bool measure);

 private:
  offload::StoreCounts counts() const;
  std::vector<offload::DriveWrites> drive_writes() const;
  void measure_limits() noexcept;
  double& limit_of(offload::Link link) { return limits_.at(static_cast<std::size_t>(link)); }

  device::Device& device_;
  std::vector<std::shared_ptr<offload::StateStore>> stores_;
  const bool offloads_;
  bool measured_ = false;
  std::array<double, offload::kLinkCount> limits_{};  // GB/s; 0: not known
};

// Engine::step_report(). `links`: null where nothing is offloaded.
std::optional<StepReport> make_step_report(StepRecorder& recorder, bool wait, int world_size,
                                           Links* links = nullptr);

}  // namespace strata::engine

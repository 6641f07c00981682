// The links of one rank: has the recorder told what goes over them, knows their limits, and makes
// the report of a step. Threads: the engine's, one at a time. Ownership: borrows the device and the
// recorder, which outlive it; keeps the stores. Errors: none; a limit that cannot be measured, as
// on a drive that is full, is absent.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "strata/device/device.h"
#include "strata/engine/record/link_report.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

class Links {
 public:
  // `stores`: may be null. `offloads`: whether anything of the engine rests elsewhere than on the
  // device; else there is nothing to report.
  Links(device::Device& device, std::vector<std::shared_ptr<offload::StateStore>> stores,
        bool offloads, StepRecorder& recorder);
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  // `measure`: measures the limits at the first call: the host waits for that some tenths of a
  // second at most.
  std::optional<LinkReport> report(const StepRecord& record, bool measure);

 private:
  offload::StoreCounts counts() const;
  std::vector<offload::DriveWear> wear() const;
  void measure_limits() noexcept;
  double& limit_of(offload::Link link) { return limits_.at(static_cast<std::size_t>(link)); }

  device::Device& device_;
  const std::vector<std::shared_ptr<offload::StateStore>> stores_;
  const bool offloads_;
  bool measured_ = false;
  std::array<double, offload::kLinkCount> limits_{};  // GB/s; 0: not known
};

}  // namespace strata::engine

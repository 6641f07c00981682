// The resources of a model: a device, and the collectives of the ranks that share the work. Several
// models of one rank may share a runtime, and with it the device's streams and kernels. Threads:
// those of its parts. Ownership: shares them.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <string>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/record/init_report.h"
#include "strata/offload/state_store.h"

namespace strata::torch {

// `collectives` carry memory of `device`, which is the engine's view of `place`; null until the
// ranks are connected.
struct ModelRuntime {
  c10::Device place{c10::DeviceType::CPU};
  std::shared_ptr<comm::Collectives> collectives;
  std::shared_ptr<device::Device> device;
  // Null: the configuration places the states.
  std::shared_ptr<offload::StateStore> states = nullptr;
  engine::InitReport::Progress progress{};  // of start-up; may be empty
  int threads = 1;                          // that work on host memory
  // Receives warnings for the user at the start, on rank 0; empty: they become torch's warnings.
  std::function<void(const std::string&)> warn{};
};

// `threads`: that work on host memory (host_threads.h).
ModelRuntime make_runtime(c10::Device place, int threads,
                          std::shared_ptr<comm::Collectives> collectives = nullptr);

}  // namespace strata::torch

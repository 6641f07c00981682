// Where a model lives: the one place that tells a GPU from the host. Everything else takes a
// c10::Device and an engine device made here. Threads: any. Errors: ConfigError that says what was
// wanted and what is there.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "strata/device/device.h"
#include "strata/engine/config/config.h"

namespace strata::torch {

// The device on which all of these lie; nullopt for none. ConfigError that names the first two
// which lie on different devices, or one without values.
std::optional<c10::Device> device_of(
    const std::vector<std::pair<std::string, at::Tensor>>& parameters);

// GPUs that torch and this build of Strata can both use.
int usable_gpus();

// Where a model shall train that lies on `present` now (nullopt: nowhere yet). kAuto: a model on a
// GPU stays there, any other goes to the GPU of this rank, `local_rank` on this host; to the host
// where no GPU can be used.
c10::Device choose_device(engine::DeviceKind wanted, std::optional<c10::Device> present,
                          int local_rank);

// `threads`: of kernels on the host, bound to this rank's cores where ranks share them
// (host_threads.h). `waits`: those of another device of this rank, to be counted with; null: its
// own.
std::shared_ptr<device::Device> make_device(c10::Device place, int threads,
                                            std::shared_ptr<device::HostWaits> waits = nullptr);

// Torch's current stream of the place, in this thread.
c10::Stream current_stream(c10::Device place);

// Memory of the engine as a tensor of one dimension; borrows it.
at::Tensor tensor_over(const void* memory, std::int64_t numel, c10::ScalarType type,
                       c10::Device place);

// Gives memory that torch keeps for reuse back to the system, for allocations past torch.
void release_cached_memory(c10::Device place);

}  // namespace strata::torch

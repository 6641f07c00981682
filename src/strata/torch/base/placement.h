// Where a model lies: the one file that distinguishes a GPU from the host. All other code takes a
// c10::Device and an engine device made here. Threads: any. Errors: ConfigError with the wanted and
// the available device.
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

// The device on which all of these lie; nullopt if there are none. ConfigError if two lie on
// different devices (it names the first two) or if one has no values.
std::optional<c10::Device> device_of(
    const std::vector<std::pair<std::string, at::Tensor>>& parameters);

// The number of GPUs that both torch and this build of Strata can use.
int usable_gpus();

// Chooses the device on which a model trains. `present`: where the model lies now; nullopt: nowhere
// yet. With kAuto, a model on a GPU stays there. Any other model goes to the GPU of this rank,
// which is `local_rank` on this host, or stays on the host if no GPU can be used.
c10::Device choose_device(engine::DeviceKind wanted, std::optional<c10::Device> present,
                          int local_rank);

// `threads`: the number of threads for kernels on the host, bound to this rank's cores if ranks
// share them (host_threads.h). `waits`: the counter of host waits that another device of this rank
// uses; null: the device makes its own.
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

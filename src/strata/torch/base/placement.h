// Where a rank works: the device on which its model lies, and its threads and cores on the host.
// This is the one file that distinguishes a GPU from the host. All other code takes a c10::Device
// and an engine device made here. Threads: any. Errors: ConfigError with the wanted and the
// available device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "strata/device/device.h"
#include "strata/engine/config/config.h"
#include "strata/io/thread_engine.h"

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
// share them. `waits`: the counter of host waits that another device of this rank
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

// Calls `give_back` whenever torch or the engine is about to take more memory of `place` from the
// driver, until the result is destroyed: in any thread, and perhaps under the lock of torch's
// allocator. The result is null where torch does not tell: on the host, and with an allocator of
// the driver.
using GiveBack = std::function<bool()>;
std::shared_ptr<void> on_growth(c10::Device place, GiveBack give_back);

// Loads the libraries and kernels that torch would load when a model first computes, by one pass of
// a tiny transformer block in this floating dtype, without random numbers. On a GPU loading takes
// most of the first step, so it runs beside a start, which leaves the GPU idle. Threads: any,
// without Python's lock; work goes to the place's default stream, and has ended when this returns.
// Memory: some megabytes of torch's cache, and memory that its libraries keep for themselves.
// Errors: torch's own; the first step would fail with them, too.
void warm_up(c10::Device place, c10::ScalarType dtype);

// The number of threads with which a rank works on host memory: for kernels, and for copying a
// model's values into the engine. It ignores torch's own number of threads, because launchers set
// that to one. Results never depend on the number.

// More threads read no more bytes per second from the memory of one socket.
inline constexpr int kMostHostThreads = 32;

// The number of cores that this process may run on, limited by the CPU time of its control group.
int usable_cores();

// The number that the whole text is; nullopt: it is none.
std::optional<int> whole_number(std::string_view text);

// The number of ranks on this host: LOCAL_WORLD_SIZE if the launcher sets it, else `world_size`.
int ranks_of_host(int world_size);

// The threads of one rank. `wanted`: the configuration's strata.threads, returned unchanged if it
// is set. Otherwise the result is the cores of this host divided by its ranks, from 1 to
// kMostHostThreads.
int host_threads(std::optional<int> wanted, int world_size);

// The same for rank 0 at the start, when it reads the whole model on the host. The other ranks then
// read only the values that they keep, at the speed of their links, so rank 0 also takes the cores
// that they do not need.
int reference_threads(std::optional<int> wanted, int world_size);

// The cores that `threads` threads of this rank are bound to (base/rank_cores.h); empty if they are
// not bound. Binding needs a launcher that sets LOCAL_RANK and LOCAL_WORLD_SIZE.
std::vector<int> host_cores(int threads);

// Options with which a rank of `threads` threads reads files. Reading the page cache at the speed
// of a link, and keeping a drive busy, both need many concurrent reads. One thread of four is left
// for queueing copies and mapping memory; without it links take a tenth longer for the same bytes.
io::EngineOptions reading_options(int threads);

}  // namespace strata::torch

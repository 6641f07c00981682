// Placement that the engine chooses itself: strata.placement "auto". Values that a step uses most
// often stay nearest: weights of sharded units, which are gathered two or three times a step, come
// before masters and moments, which are used once. So the device takes weights and then states,
// unit by unit in their order, until its room is full. The host takes the next ones, and a drive
// the rest, if the configuration names a folder on one. If states do not stay on the device,
// gradients go to the host.
//
// The forecast runs the engine to find whether a placement fits (memory_forecast.h); there is no
// formula. The result is ParamSpec::place of each parameter, and nothing else; a
// unit's parameters stay together. Pure functions: the same room gives the same places. They take
// about twenty forecasts. Errors: OutOfMemoryError where a tier does not suffice, with the numbers.
#pragma once

#include <optional>
#include <vector>

#include "strata/forecast/memory_forecast.h"

namespace strata::forecast {

// The most bytes that one rank may hold. Absent: no bound.
struct Room {
  std::optional<Bytes> device;  // by the engine; without a bound nothing is offloaded
  std::optional<Bytes> host;    // of what is offloaded and staged
};

// The memory that a rank finds free. Absent: not known.
struct FreeMemory {
  std::optional<Bytes> device;
  std::optional<Bytes> host;  // its share
  // The device's memory is the host's. Then only strata.device_budget bounds it.
  bool is_one = false;
};

// The free memory of a job that does not run, on idle machines. `device`: bytes of one device;
// `host`: bytes of one host, which its ranks share.
FreeMemory free_memory_of(const Job& job, std::optional<Bytes> device, std::optional<Bytes> host);

// The configuration's bounds, else a share of the free memory. A third of a device stays for torch:
// 26 of 80 GB. The logits of 16 thousand tokens over a vocabulary of 152 thousand take 25 GB with
// their gradient. A step that does not fit ends the training, while a state on the host costs one
// transfer a step. A quarter of the host stays for the page cache and for data loading, since
// pinned memory cannot be reclaimed.
Room room_for(const engine::OffloadConfig& config, const FreeMemory& free);

// Writes the places of `params`, which are in the dtypes that they compute in. Does nothing where
// the configuration's placement is not automatic.
void place_automatically(std::vector<plan::ParamSpec>& params, const plan::ModuleTree& tree,
                         const engine::Config& config, const Trainers& trainers, const Room& room);

}  // namespace strata::forecast

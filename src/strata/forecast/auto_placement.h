// Placement that the engine chooses itself: strata.placement "auto". What a step uses most often
// for each byte stays nearest: weights of sharded units, which are gathered two or three times a
// step, before masters and moments, which are used once. So the device takes weights and then
// states, unit by unit in their order, as far as its room goes; the host takes what follows, and a
// drive the rest, where the configuration has a folder on one. Gradients go where the states do not
// stay on the device: to the host.
//
// Whether something fits is what the forecast says, which runs the engine (memory_forecast.h); no
// formula stands in for it. The result is ParamSpec::place of each parameter, and nothing else; a
// unit's parameters stay together. Pure functions: the same room gives the same places. They take
// about twenty forecasts. Errors: OutOfMemoryError where a tier does not suffice, with the numbers.
#pragma once

#include <optional>
#include <vector>

#include "strata/forecast/job_forecast.h"

namespace strata::forecast {

// What one rank may hold at its peak. Absent: no bound.
struct Room {
  std::optional<Bytes> device;  // by the engine; without a bound nothing is offloaded
  std::optional<Bytes> host;    // of what is offloaded and staged
};

// What a rank finds free. Absent: nobody knows.
struct FreeMemory {
  std::optional<Bytes> device;
  std::optional<Bytes> host;  // its share
  // The device's memory is the host's. Then only strata.device_budget bounds it.
  bool is_one = false;
};

// Of a job that does not run, on machines that hold nothing yet. `device`: of one device; `host`:
// of one host, which its ranks share.
FreeMemory free_memory_of(const Job& job, std::optional<Bytes> device, std::optional<Bytes> host);

// What the configuration says, and else a share of what is free. A third of a device stays for
// what torch takes: of 80 GB that is 26, and the logits of 16 thousand tokens over a vocabulary of
// 152 thousand take 25 with their gradient. A step that does not fit ends the training, while a
// state on the host costs one way over the link each step. A quarter of the host stays for the page
// cache and for who loads data, since pinned memory cannot be taken back.
Room room_for(const engine::OffloadConfig& config, const FreeMemory& free);

// Writes the places of `params`, which are in the dtypes that they compute in. Does nothing where
// the configuration's placement is not automatic.
void place_automatically(std::vector<plan::ParamSpec>& params, const plan::ModuleTree& tree,
                         const engine::Config& config, const Trainers& trainers, const Room& room);

}  // namespace strata::forecast

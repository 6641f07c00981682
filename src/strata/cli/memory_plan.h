// `strata plan`: the memory that each device of a job would hold at every stage, its host and its
// drive, and which of them suffice. The engine itself computes it, run on a device without memory
// (forecast/); the model comes from its files (named_model.h). Values. Errors: ConfigError for a
// configuration that is wrong, or does not suit this number of ranks at its own stage; those of
// read_model().
#pragma once

#include <optional>
#include <string>

#include "strata/cli/console.h"
#include "strata/forecast/memory_forecast.h"

namespace strata::cli {

struct PlanRequest {
  std::string config;  // path, or JSON text
  std::string model;   // a folder
  forecast::Job job;
  std::optional<Bytes> device_memory;
  std::optional<Bytes> host_memory;  // of a host, whose ranks share it
  std::optional<Bytes> nvme_space;   // likewise
};

Report make_plan(const PlanRequest& request);

}  // namespace strata::cli

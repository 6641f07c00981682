// `strata plan`: the memory that each device of a job would hold at every stage, its host and its
// drive, and which of them suffice; or a grid of stages and placements, of which one that fits is
// written as a configuration. The engine itself computes it, run on a device without memory
// (forecast/); the model comes from its files, or from its configuration alone (named_model.h).
// Only activations are estimated. Values. Errors: ConfigError for a configuration that is wrong, or
// does not suit this number of ranks at its own stage; those of read_model(); IoError for a file
// that cannot be written.
#pragma once

#include <optional>
#include <string>

#include "strata/cli/console.h"
#include "strata/cli/named_model.h"
#include "strata/forecast/memory_forecast.h"

namespace strata::cli {

struct PlanRequest {
  std::string config;  // path, or JSON text; empty: bf16, and the grid
  std::string model;   // as read_model() takes it
  TrainedPart trained;
  forecast::Job job;
  std::optional<Bytes> device_memory;
  std::optional<Bytes> host_memory;       // of a host, whose ranks share it
  std::optional<Bytes> nvme_space;        // likewise
  std::int64_t seq = 0;                   // tokens of a sample; above 0: activations are estimated
  std::int64_t micro_batch = 0;           // 0: the configuration's, or 1
  bool checkpointing = false;             // of activations
  bool grid = false;                      // of stages and placements
  bool shapes = false;                    // list the parameters
  std::string write;                      // a file for the first of the grid that fits
  std::string nvme_path = "/local_nvme";  // where the configuration names none
};

Report make_plan(const PlanRequest& request);

}  // namespace strata::cli

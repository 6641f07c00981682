// What each device of a job would hold at every stage, and which of them fit, as `strata plan`
// shows it. The engine itself says so, run on a device without memory (forecast/); only the model
// is as its files tell it (named_model.h). Values. Errors: ConfigError for a configuration that is
// wrong, or does not suit so many ranks at its own stage; those of read_model().
#pragma once

#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "strata/cli/named_model.h"
#include "strata/forecast/job_forecast.h"

namespace strata::cli {

struct PlanRequest {
  std::string config;  // path, or JSON text
  std::string model;   // a folder
  forecast::Job job;
  std::optional<Bytes> device_memory;
};

struct StagePlan {
  std::optional<forecast::MemoryForecast> forecast;
  std::string refused;  // why there is no forecast
};

struct MemoryPlan {
  PlanRequest request;
  std::size_t tensors = 0;
  Numel elements;
  Bytes weights;  // of the whole model, in the dtypes that it computes in
  int stage = 0;  // the configuration's
  std::array<StagePlan, 4> stages;
  // Where nothing fits: the least number of ranks, doubling, at which stage 3 does.
  std::optional<int> fits_from;
  std::vector<std::string> remarks;

  // Absent where nobody said how much there is, or where the stage was refused.
  std::optional<bool> fits(int at_stage) const;
  // Of each rank at the configuration's own stage: what is offloaded, and staging, that of loading
  // and saving among it.
  Bytes host(memory::Kind kind) const;
  Bytes host_total() const;
};

MemoryPlan make_plan(const PlanRequest& request);
// Of a model that is known already.
MemoryPlan make_plan(const PlanRequest& request, const NamedModel& model);

std::string text_of(const MemoryPlan& plan);
nlohmann::json json_of(const MemoryPlan& plan);

}  // namespace strata::cli

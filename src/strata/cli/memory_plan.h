// `strata plan`: the memory that each device of a job would hold at every stage, its host and its
// drive, and which of them suffice. The engine itself computes it, run on a device without memory
// (forecast/); the model comes from its files (named_model.h). Values. Errors: ConfigError for a
// configuration that is wrong, or does not suit this number of ranks at its own stage; those of
// read_model().
#pragma once

#include <array>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "strata/cli/named_model.h"
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

struct StagePlan {
  std::optional<forecast::MemoryForecast> forecast;
  std::string refused;  // why there is no forecast: the configuration
  std::string lacking;  // or memory, where placement is automatic

  // The offloaded and staging bytes of each rank on the host or the drive. Zero without a forecast.
  Bytes held_on(memory::Tier tier, memory::Kind kind) const;
  Bytes total_on(memory::Tier tier) const;
};

struct MemoryPlan {
  PlanRequest request;
  std::size_t tensors = 0;
  Numel elements;
  Bytes weights;  // of the whole model, in the dtypes that it computes in
  int stage = 0;  // the configuration's
  std::array<StagePlan, 4> stages;
  int ranks_of_host = 1;  // that share its memory and drives
  // Where nothing fits: the least number of ranks, doubling, at which stage 3 does.
  std::optional<int> fits_from;
  std::vector<std::string> remarks;

  const StagePlan& own() const { return stages[static_cast<std::size_t>(stage)]; }
  // Whether the device suffices. Absent if its size was not given, or if the stage was refused.
  std::optional<bool> fits(int at_stage) const;
  // The room of each rank on the host or the drive, and whether it suffices. Absent if its size was
  // not given, or if there is no forecast.
  std::optional<Bytes> room_on(memory::Tier tier) const;
  std::optional<bool> fits_on(memory::Tier tier, int at_stage) const;
  // Whatever was asked fits.
  bool fits_all(int at_stage) const;
  bool fits_all() const { return fits_all(stage); }
};

MemoryPlan make_plan(const PlanRequest& request);
// The same for a model that is known already.
MemoryPlan make_plan(const PlanRequest& request, const NamedModel& model);

std::string text_of(const MemoryPlan& plan);
nlohmann::json json_of(const MemoryPlan& plan);

}  // namespace strata::cli

// Forecasts the bytes that the engine will hold on a rank's device, and on host and drives for it.
// The engine itself runs some steps on a device without memory, so it makes the same decisions
// about gathering, keeping and reducing as in training; nothing is estimated. Only the order in
// which gradients come within a block is not known: the forecast takes the order that holds most.
// Not included are the model's activations, gradients before they reach the engine (all of a block
// that torch.compile compiles), and memory that collectives keep for themselves.
//
// Takes hardly any memory, and milliseconds for thousands of parameters. Pure functions.
// Errors: those of Engine's construction; OutOfMemoryError where the system has no more addresses;
// for a job, UsageError for an invalid number of ranks, and ConfigError if shard groups are uneven,
// or if "peer" would have to reach another host.
#pragma once

#include <array>
#include <span>
#include <string>

#include "strata/comm/traits.h"
#include "strata/engine/config/config.h"
#include "strata/engine/engine.h"
#include "strata/memory/ledger.h"
#include "strata/plan/block_search.h"
#include "strata/plan/unit_plan.h"

namespace strata::forecast {

// Peaks by tier. On the device those of the engine. Host memory is pinned: offloaded values,
// staging for drives, the ring that a rank has while it loads or saves, and the copy of a
// checkpoint that is written beside training. Bytes on drives are taken once and stay.
struct MemoryForecast {
  struct OfTier {
    std::array<Bytes, memory::kKindCount> by_kind{};  // by memory::Kind
    Bytes total;                                      // the peak of their sum
  };
  std::array<OfTier, memory::kTierCount> tiers{};  // by memory::Tier

  Bytes on(memory::Tier tier, memory::Kind kind) const {
    return tiers[static_cast<std::size_t>(tier)].by_kind[static_cast<std::size_t>(kind)];
  }
  Bytes total_on(memory::Tier tier) const { return tiers[static_cast<std::size_t>(tier)].total; }
  // On the device.
  Bytes of(memory::Kind kind) const { return on(memory::Tier::kDevice, kind); }
  Bytes total() const { return total_on(memory::Tier::kDevice); }
};

// The peaks of a rank's ledger.
MemoryForecast peaks_of(const memory::Ledger& ledger);

// "weights 1.50 GiB, staging 48.0 MiB": the kinds that the tier holds anything of; "nothing".
std::string kinds_on(const MemoryForecast& forecast, memory::Tier tier);

// The facts about a training job that its configuration does not hold.
struct Trainers {
  engine::UpdateRule rule = engine::UpdateRule::kAdamW;
  comm::Traits traits;      // of the ranks' collectives
  bool runs_ahead = false;  // the device: GPUs do
};

// How a model is trained.
struct Training : Trainers {
  engine::EngineOptions options;
  int micro_steps = 1;        // of a step
  bool saves_beside = false;  // checkpoints are copied to the host, and written while steps run
};

// The same forecast holds for every rank, since shards are equal. `plan` was made from `tree`.
MemoryForecast forecast_memory(std::span<const plan::ParamSpec> params, const plan::ModelPlan& plan,
                               const plan::ModuleTree& tree, const Training& training);

// A job that does not run.
struct Job {
  int world_size = 1;
  bool on_gpus = true;
  int ranks_per_host = 0;  // consecutive ones; 0: all ranks are on one host
};

// That share a host's memory and drives.
int ranks_of_a_host(const Job& job);

// The traits of the collectives that would carry its bytes (comm/transports.h), if a probe of the
// transports' speeds would not change "auto".
comm::Traits traits_of_job(const engine::Config& config, const Job& job);

// For a job that does not run. Errors: those of traits_of_job().
Trainers trainers_of(const engine::Config& config, engine::UpdateRule rule, const Job& job);

// The options of an engine for these parameters. If parameters keep their dtypes, numbers of
// elements in the configuration become bytes by the dtype that most elements have. The stores are
// those of the tiers that the configuration names, and, if placement is automatic, of the tiers of
// the parameters.
engine::EngineOptions engine_options_of(std::span<const plan::ParamSpec> params,
                                        const engine::Config& config);

// `params` in the dtype that they compute in; `plan` was made from them and the tree.
// `config.batch` says the accumulation steps, one where it does not. Errors: of forecast_memory().
MemoryForecast forecast_training(std::span<const plan::ParamSpec> params,
                                 const plan::ModelPlan& plan, const plan::ModuleTree& tree,
                                 const engine::Config& config, const Trainers& trainers);

}  // namespace strata::forecast

#include "strata/cli/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "strata/base/error.h"
#include "strata/engine/config/config.h"
#include "strata/engine/config/config_text.h"
#include "strata/forecast/auto_placement.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;

constexpr int kRanksMax = 65'536;  // that are tried

struct Document {
  Json json;
  std::vector<std::string> remarks;
};

Document read_document(const std::string& config) {
  const engine::ConfigSource source = engine::open_config_source(config);
  Document document{engine::parse_json_text(source.text, source.origin), {}};
  engine::Config::parse(source.text);  // errors by the configuration's own paths
  Json& json = document.json;
  if (json.contains("strata") && json["strata"].is_object() && json["strata"].erase("wrap") > 0) {
    document.remarks.emplace_back(
        "strata.wrap names classes, which files do not tell: blocks are found by their numbers");
  }
  return document;
}

engine::Config config_at(const Json& document, int stage) {
  Json json = document;
  Json& zero = json["zero_optimization"];
  if (!zero.is_object()) zero = Json::object();
  zero["stage"] = stage;
  return engine::Config::parse(engine::canonical_text(json));
}

engine::UpdateRule rule_of(const engine::Config& config, std::vector<std::string>& remarks) {
  if (!config.optimizer) {
    remarks.emplace_back("the configuration names no optimizer: taken to be AdamW");
    return engine::UpdateRule::kAdamW;
  }
  if (!config.optimizer->in_own_kernel) {
    remarks.push_back(fmt::format("what torch.optim.{} keeps of each parameter is not counted",
                                  config.optimizer->torch_class));
    return engine::UpdateRule::kExternal;
  }
  return config.optimizer->adam.decoupled ? engine::UpdateRule::kAdamW : engine::UpdateRule::kAdam;
}

// Remarks on settings that are planned with a default, and that a framework will fill in.
void record_open(const engine::Config& config, std::vector<std::string>& remarks) {
  for (const engine::OpenSetting& setting : config.open) {
    if (setting.path == "bf16.enabled" || setting.path == "fp16.enabled") {
      remarks.push_back(fmt::format(
          "{} is \"auto\", which a framework fills in: taken to be false here", setting.path));
    }
  }
}

// Where the configuration leaves the batch open, micro-steps are what it says, or one.
void complete_batch(engine::Config& config, int world_size, std::vector<std::string>& remarks) {
  const bool open = !config.batch.train_batch_size && !config.batch.micro_batch_size;
  if (open) {
    if (!config.batch.accumulation_steps)
      remarks.emplace_back("the batch is open (\"auto\"): no gradient accumulation");
    config.batch.micro_batch_size = 1;
  }
  config.complete_batch(world_size);
}

std::vector<plan::ParamSpec> specs_of(const NamedModel& model, const engine::Config& config) {
  std::vector<plan::ParamSpec> specs = model.params;
  for (plan::ParamSpec& spec : specs) {
    spec.dtype = config.precision.weight_dtype(spec.dtype);
    spec.trainable = spec.trainable && is_floating(spec.dtype);
  }
  engine::place_params(specs, config.offload);
  return specs;
}

// Without a given size of the device, no value has to leave it.
void log_unbounded(const engine::Config& config, const PlanRequest& request,
                   std::vector<std::string>& remarks) {
  if (!config.offload.automatic || config.offload.device_budget) return;
  if (!request.job.on_gpus) {
    remarks.emplace_back(
        "strata.placement is \"auto\", and CPU ranks offload nothing without strata.device_budget");
  } else if (!request.device_memory) {
    remarks.emplace_back(
        "strata.placement is \"auto\", and all stays on the device, since neither --device-memory "
        "nor strata.device_budget says what that has");
  }
}

forecast::MemoryForecast forecast_at(const NamedModel& model, const engine::Config& config,
                                     engine::UpdateRule rule, const forecast::Job& job,
                                     const PlanRequest& request) {
  std::vector<plan::ParamSpec> specs = specs_of(model, config);
  const forecast::Trainers trainers = forecast::trainers_of(config, rule, job);
  const forecast::FreeMemory free =
      forecast::free_memory_of(job, request.device_memory, request.host_memory);
  forecast::place_automatically(specs, model.tree, config, trainers,
                                forecast::room_for(config.offload, free));
  const plan::ModelPlan plan =
      plan::plan_units(specs, model.tree, engine::plan_options_from(config));
  return forecast::forecast_training(specs, plan, model.tree, config, trainers);
}

std::optional<int> find_world(const NamedModel& model, const engine::Config& config,
                              engine::UpdateRule rule, const PlanRequest& request) {
  for (int world = request.job.world_size * 2; world <= kRanksMax; world *= 2) {
    forecast::Job job = request.job;
    job.world_size = world;
    if (job.ranks_per_host == 0) job.ranks_per_host = request.job.world_size;
    try {
      const Bytes total = forecast_at(model, config, rule, job, request).total;
      if (total <= *request.device_memory) return world;
    } catch (const ConfigError&) {
      return std::nullopt;  // shard groups that do not come out even
    } catch (const OutOfMemoryError&) {
      continue;  // automatic placement has no room
    }
  }
  return std::nullopt;
}

}  // namespace

Bytes StagePlan::held_on(memory::Tier tier, memory::Kind kind) const {
  return forecast ? forecast->on(tier, kind) : Bytes();
}

Bytes StagePlan::total_on(memory::Tier tier) const {
  return forecast ? forecast->total_on(tier) : Bytes();
}

std::optional<bool> MemoryPlan::fits(int at_stage) const {
  const StagePlan& entry = stages[static_cast<std::size_t>(at_stage)];
  if (!entry.lacking.empty()) return false;
  if (!request.device_memory || !entry.forecast) return std::nullopt;
  return entry.forecast->total <= *request.device_memory;
}

std::optional<Bytes> MemoryPlan::room_on(memory::Tier tier) const {
  const std::optional<Bytes> shared =
      tier == memory::Tier::kHost ? request.host_memory : request.nvme_space;
  return shared ? std::optional(*shared / ranks_of_host) : std::nullopt;
}

std::optional<bool> MemoryPlan::fits_on(memory::Tier tier, int at_stage) const {
  const StagePlan& entry = stages[static_cast<std::size_t>(at_stage)];
  const std::optional<Bytes> room = room_on(tier);
  if (!room || !entry.forecast) return std::nullopt;
  return entry.total_on(tier) <= *room;
}

bool MemoryPlan::fits_all(int at_stage) const {
  return fits(at_stage) != false && fits_on(memory::Tier::kHost, at_stage) != false &&
         fits_on(memory::Tier::kNvme, at_stage) != false;
}

MemoryPlan make_plan(const PlanRequest& request) {
  return make_plan(request, read_model(request.model));
}

MemoryPlan make_plan(const PlanRequest& request, const NamedModel& model) {
  MemoryPlan plan;
  plan.request = request;
  plan.remarks = model.remarks;
  const Document document = read_document(request.config);
  plan.remarks.insert(plan.remarks.end(), document.remarks.begin(), document.remarks.end());
  engine::Config own = engine::Config::parse(engine::canonical_text(document.json));
  plan.stage = own.zero.stage;
  const engine::UpdateRule rule = rule_of(own, plan.remarks);
  record_open(own, plan.remarks);
  complete_batch(own, request.job.world_size, plan.remarks);
  plan.ranks_of_host = forecast::ranks_of_a_host(request.job);
  log_unbounded(own, request, plan.remarks);
  plan.tensors = model.params.size();
  for (const plan::ParamSpec& spec : specs_of(model, own)) {
    plan.elements += spec.numel();
    plan.weights += bytes_of(spec.numel(), spec.dtype);
  }
  const auto config = [&](int stage) {
    engine::Config result = config_at(document.json, stage);
    result.batch = own.batch;
    return result;
  };
  for (int stage = 0; stage < 4; ++stage) {
    StagePlan& entry = plan.stages[static_cast<std::size_t>(stage)];
    try {
      entry.forecast = forecast_at(model, config(stage), rule, request.job, request);
    } catch (const ConfigError& error) {
      if (stage == plan.stage) throw;
      entry.refused = error.what();
    } catch (const OutOfMemoryError& error) {
      entry.lacking = error.what();
    }
  }
  const auto fits = [&](int stage) { return plan.fits(stage) == true; };
  if (request.device_memory && !fits(0) && !fits(1) && !fits(2) && !fits(3) &&
      plan.stages[3].refused.empty()) {
    plan.fits_from = find_world(model, config(3), rule, request);
  }
  return plan;
}

}  // namespace strata::cli

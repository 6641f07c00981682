#include "strata/cli/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "strata/base/error.h"
#include "strata/cli/text_table.h"
#include "strata/engine/config/config_source.h"
#include "strata/engine/config/json_text.h"
#include "strata/engine/config/plan_options.h"

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
  if (config.optimizer->kind == engine::OptimizerKind::kTorch) {
    remarks.push_back(fmt::format("what torch.optim.{} keeps of each parameter is not counted",
                                  config.optimizer->torch_class));
    return engine::UpdateRule::kExternal;
  }
  return config.optimizer->adam.decoupled ? engine::UpdateRule::kAdamW : engine::UpdateRule::kAdam;
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

forecast::MemoryForecast forecast_at(const NamedModel& model, const engine::Config& config,
                                     engine::UpdateRule rule, const forecast::Job& job) {
  const std::vector<plan::ParamSpec> specs = specs_of(model, config);
  const plan::ModelPlan plan =
      plan::plan_units(specs, model.tree, engine::plan_options_from(config));
  return forecast::forecast_job(specs, plan, model.tree, config, rule, job);
}

std::optional<int> find_world(const NamedModel& model, const engine::Config& config,
                              engine::UpdateRule rule, const PlanRequest& request) {
  for (int world = request.job.world_size * 2; world <= kRanksMax; world *= 2) {
    forecast::Job job = request.job;
    job.world_size = world;
    if (job.ranks_per_host == 0) job.ranks_per_host = request.job.world_size;
    try {
      if (forecast_at(model, config, rule, job).total <= *request.device_memory) return world;
    } catch (const ConfigError&) {
      return std::nullopt;  // shard groups that do not come out even
    }
  }
  return std::nullopt;
}

bool is_planned(memory::Kind kind) {
  return kind != memory::Kind::kWorkspace;  // what kernels keep for themselves nobody plans
}

std::string cell(const StagePlan& stage, Bytes bytes) {
  return stage.forecast ? to_string(bytes) : "-";
}

TextTable table_of(const MemoryPlan& plan) {
  TextTable table({"each device holds", "stage 0", "stage 1", "stage 2", "stage 3", "host"});
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    if (!is_planned(kind)) continue;
    std::vector<std::string> row{std::string(name_of(kind))};
    for (const StagePlan& stage : plan.stages)
      row.push_back(cell(stage, stage.forecast ? stage.forecast->of(kind) : Bytes()));
    row.push_back(to_string(plan.host(kind)));
    table.add(std::move(row));
  }
  table.add_line();
  std::vector<std::string> total{"at most, together"};
  for (const StagePlan& stage : plan.stages)
    total.push_back(cell(stage, stage.forecast ? stage.forecast->total : Bytes()));
  total.push_back(to_string(plan.host_total()));
  table.add(std::move(total));
  if (!plan.request.device_memory) return table;
  std::vector<std::string> fits{fmt::format("fits {}", to_string(*plan.request.device_memory))};
  for (int stage = 0; stage < 4; ++stage) {
    const std::optional<bool> answer = plan.fits(stage);
    fits.emplace_back(!answer ? "-" : *answer ? "yes" : "no");
  }
  table.add(std::move(fits));
  return table;
}

std::string advice_of(const MemoryPlan& plan) {
  if (!plan.request.device_memory) return "";
  const std::optional<bool> own = plan.fits(plan.stage);
  if (own == true) return fmt::format("stage {} of the configuration fits\n", plan.stage);
  std::string text = fmt::format("stage {} of the configuration {}\n", plan.stage,
                                 own ? "DOES NOT FIT" : "is refused");
  for (int stage = 0; stage < 4; ++stage) {
    if (plan.fits(stage) == true)
      return text + fmt::format("write \"stage\": {}, which does\n", stage);
  }
  return text +
         (plan.fits_from
              ? fmt::format("no stage does on {}; stage 3 does from {} ranks\n",
                            count_of(static_cast<std::size_t>(plan.request.job.world_size), "rank"),
                            *plan.fits_from)
              : "no stage does, nor on more ranks\n");
}

}  // namespace

std::optional<bool> MemoryPlan::fits(int at_stage) const {
  const StagePlan& entry = stages[static_cast<std::size_t>(at_stage)];
  if (!request.device_memory || !entry.forecast) return std::nullopt;
  return entry.forecast->total <= *request.device_memory;
}

Bytes MemoryPlan::host(memory::Kind kind) const {
  return stages[static_cast<std::size_t>(stage)].forecast->on_host(kind);
}

Bytes MemoryPlan::host_total() const {
  return stages[static_cast<std::size_t>(stage)].forecast->host;
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
  complete_batch(own, request.job.world_size, plan.remarks);
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
      entry.forecast = forecast_at(model, config(stage), rule, request.job);
    } catch (const ConfigError& error) {
      if (stage == plan.stage) throw;
      entry.refused = error.what();
    }
  }
  const auto fits = [&](int stage) { return plan.fits(stage) == true; };
  if (request.device_memory && !fits(0) && !fits(1) && !fits(2) && !fits(3) &&
      plan.stages[3].forecast) {
    plan.fits_from = find_world(model, config(3), rule, request);
  }
  return plan;
}

std::string text_of(const MemoryPlan& plan) {
  std::string text = fmt::format(
      "{}: {} of {} elements, {} of weights\n{} at stage {} of the configuration, {}\n\n",
      plan.request.model, count_of(plan.tensors, "parameter"), with_commas(plan.elements.value),
      to_string(plan.weights),
      count_of(static_cast<std::size_t>(plan.request.job.world_size), "rank"), plan.stage,
      plan.request.job.on_gpus ? "on GPUs" : "on CPUs");
  text += table_of(plan).text() + advice_of(plan) + "\n";
  for (std::size_t stage = 0; stage < plan.stages.size(); ++stage) {
    if (!plan.stages[stage].refused.empty())
      text += fmt::format("stage {} is refused: {}\n", stage, plan.stages[stage].refused);
  }
  text +=
      "Not counted: activations, gradients before they reach the engine, and what torch, the "
      "driver "
      "and\nthe collectives keep for themselves. Kinds are peaks of their own, and do not add up.\n"
      "The host's are of each rank at the configuration's stage, while it loads or saves.\n";
  for (const std::string& remark : plan.remarks) text += "- " + remark + "\n";
  return text;
}

Json json_of(const MemoryPlan& plan) {
  Json json = {{"model", plan.request.model},
               {"world_size", plan.request.job.world_size},
               {"parameters", plan.tensors},
               {"elements", plan.elements.value},
               {"weight_bytes", plan.weights.value},
               {"stage", plan.stage},
               {"stages", Json::array()},
               {"host", {{"total", plan.host_total().value}}},
               {"remarks", plan.remarks}};
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    if (plan.host(kind).value > 0) json["host"][std::string(name_of(kind))] = plan.host(kind).value;
  }
  json["device_memory"] =
      plan.request.device_memory ? Json(plan.request.device_memory->value) : Json();
  json["fits_from"] = plan.fits_from ? Json(*plan.fits_from) : Json();
  for (int s = 0; s < 4; ++s) {
    const StagePlan& stage = plan.stages[static_cast<std::size_t>(s)];
    Json entry = {{"stage", s}};
    const std::optional<bool> fits = plan.fits(s);
    entry["fits"] = fits ? Json(*fits) : Json();
    entry["refused"] = stage.refused.empty() ? Json() : Json(stage.refused);
    if (stage.forecast) {
      for (int k = 0; k < memory::kKindCount; ++k) {
        const auto kind = static_cast<memory::Kind>(k);
        if (is_planned(kind))
          entry["device"][std::string(name_of(kind))] = stage.forecast->of(kind).value;
      }
      entry["device"]["total"] = stage.forecast->total.value;
    }
    json["stages"].push_back(std::move(entry));
  }
  return json;
}

}  // namespace strata::cli

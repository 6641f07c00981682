#include "strata/cli/memory_plan.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "strata/base/error.h"
#include "strata/cli/console.h"
#include "strata/engine/config/config.h"
#include "strata/engine/config/config_text.h"
#include "strata/forecast/auto_placement.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;

constexpr int kRanksMax = 65'536;  // that are tried

// Makes the plan of one request. The remarks say what it assumes.
class Planner {
 public:
  Planner(const PlanRequest& request, const NamedModel& model) : request_(request), model_(model) {}

  MemoryPlan run() {
    plan_.request = request_;
    plan_.remarks = model_.remarks;
    read_document();
    engine::Config own = engine::Config::parse(engine::canonical_text(document_));
    plan_.stage = own.zero.stage;
    choose_rule(own);
    record_open(own);
    complete_batch(own);
    plan_.ranks_of_host = forecast::ranks_of_a_host(request_.job);
    record_unbounded(own);
    plan_.tensors = model_.params.size();
    for (const plan::ParamSpec& spec : specs_of(own)) {
      plan_.elements += spec.numel();
      plan_.weights += bytes_of(spec.numel(), spec.dtype);
    }
    for (int stage = 0; stage < 4; ++stage) forecast_stage(stage);
    const auto fits = [&](int stage) { return plan_.fits(stage) == true; };
    if (request_.device_memory && !fits(0) && !fits(1) && !fits(2) && !fits(3) &&
        plan_.stages[3].refused.empty())
      plan_.fits_from = find_world();
    return std::move(plan_);
  }

 private:
  void remark(std::string text) { plan_.remarks.push_back(std::move(text)); }

  void read_document() {
    const engine::ConfigSource source = engine::open_config_source(request_.config);
    document_ = engine::parse_json_text(source.text, source.origin);
    engine::Config::parse(source.text);  // errors by the configuration's own paths
    if (document_.contains("strata") && document_["strata"].is_object() &&
        document_["strata"].erase("wrap") > 0) {
      remark(
          "strata.wrap names classes, which files do not tell: blocks are found by their numbers");
    }
  }

  void choose_rule(const engine::Config& config) {
    if (!config.optimizer) {
      remark("the configuration names no optimizer: taken to be AdamW");
    } else if (!config.optimizer->in_own_kernel) {
      remark(fmt::format("what torch.optim.{} keeps of each parameter is not counted",
                         config.optimizer->torch_class));
      rule_ = engine::UpdateRule::kExternal;
    } else if (!config.optimizer->adam.decoupled) {
      rule_ = engine::UpdateRule::kAdam;
    }
  }

  // Settings that are planned with a default, and that a framework will fill in.
  void record_open(const engine::Config& config) {
    for (const engine::OpenSetting& setting : config.open) {
      if (setting.path == "bf16.enabled" || setting.path == "fp16.enabled") {
        remark(fmt::format("{} is \"auto\", which a framework fills in: taken to be false here",
                           setting.path));
      }
    }
  }

  // Where the configuration leaves the batch open, micro-steps are what it says, or one.
  void complete_batch(engine::Config& config) {
    if (!config.batch.train_batch_size && !config.batch.micro_batch_size) {
      if (!config.batch.accumulation_steps)
        remark("the batch is open (\"auto\"): no gradient accumulation");
      config.batch.micro_batch_size = 1;
    }
    config.complete_batch(request_.job.world_size);
    batch_ = config.batch;
  }

  // Without a given size of the device, no value has to leave it.
  void record_unbounded(const engine::Config& config) {
    if (!config.offload.automatic || config.offload.device_budget) return;
    if (!request_.job.on_gpus) {
      remark(
          "strata.placement is \"auto\", and CPU ranks offload nothing without "
          "strata.device_budget");
    } else if (!request_.device_memory) {
      remark(
          "strata.placement is \"auto\", and all stays on the device, since neither "
          "--device-memory nor strata.device_budget says what that has");
    }
  }

  engine::Config config_at(int stage) const {
    Json json = document_;
    Json& zero = json["zero_optimization"];
    if (!zero.is_object()) zero = Json::object();
    zero["stage"] = stage;
    engine::Config config = engine::Config::parse(engine::canonical_text(json));
    config.batch = batch_;
    return config;
  }

  std::vector<plan::ParamSpec> specs_of(const engine::Config& config) const {
    std::vector<plan::ParamSpec> specs = model_.params;
    for (plan::ParamSpec& spec : specs) {
      spec.dtype = config.precision.weight_dtype(spec.dtype);
      spec.trainable = spec.trainable && is_floating(spec.dtype);
    }
    engine::place_params(specs, config.offload);
    return specs;
  }

  forecast::MemoryForecast forecast_at(const engine::Config& config,
                                       const forecast::Job& job) const {
    std::vector<plan::ParamSpec> specs = specs_of(config);
    const forecast::Trainers trainers = forecast::trainers_of(config, rule_, job);
    const forecast::FreeMemory free =
        forecast::free_memory_of(job, request_.device_memory, request_.host_memory);
    forecast::place_automatically(specs, model_.tree, config, trainers,
                                  forecast::room_for(config.offload, free));
    const plan::ModelPlan plan =
        plan::plan_units(specs, model_.tree, engine::plan_options_from(config));
    return forecast::forecast_training(specs, plan, model_.tree, config, trainers);
  }

  void forecast_stage(int stage) {
    StagePlan& entry = plan_.stages[static_cast<std::size_t>(stage)];
    try {
      entry.forecast = forecast_at(config_at(stage), request_.job);
    } catch (const ConfigError& error) {
      if (stage == plan_.stage) throw;
      entry.refused = error.what();
    } catch (const OutOfMemoryError& error) {
      entry.lacking = error.what();
    }
  }

  std::optional<int> find_world() const {
    const engine::Config config = config_at(3);
    forecast::Job job = request_.job;
    if (job.ranks_per_host == 0) job.ranks_per_host = job.world_size;
    for (job.world_size *= 2; job.world_size <= kRanksMax; job.world_size *= 2) {
      try {
        if (forecast_at(config, job).total() <= *request_.device_memory) return job.world_size;
      } catch (const ConfigError&) {
        return std::nullopt;  // shard groups that do not come out even
      } catch (const OutOfMemoryError&) {
        continue;  // automatic placement has no room
      }
    }
    return std::nullopt;
  }

  const PlanRequest& request_;
  const NamedModel& model_;
  MemoryPlan plan_;
  Json document_;
  engine::UpdateRule rule_ = engine::UpdateRule::kAdamW;
  engine::BatchSizes batch_;
};

bool is_planned(memory::Kind kind) {
  return kind != memory::Kind::kWorkspace;  // memory of kernels is not planned
}

std::string cell(const StagePlan& stage, Bytes bytes) {
  return stage.forecast ? to_string(bytes) : "-";
}

std::string answer_of(std::optional<bool> fits) {
  return !fits ? "-" : *fits ? "yes" : "no";
}

template <typename Of>
void add_row(TextTable& table, const MemoryPlan& plan, std::string label, const Of& of) {
  std::vector<std::string> row{std::move(label)};
  for (const StagePlan& stage : plan.stages) row.push_back(cell(stage, of(stage)));
  table.add(std::move(row));
}

template <typename Fits>
void add_answers(TextTable& table, std::string label, const Fits& fits) {
  std::vector<std::string> row{std::move(label)};
  for (int stage = 0; stage < 4; ++stage) row.push_back(answer_of(fits(stage)));
  table.add(std::move(row));
}

void add_device(TextTable& table, const MemoryPlan& plan) {
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    if (!is_planned(kind)) continue;
    add_row(table, plan, std::string(name_of(kind)), [&](const StagePlan& stage) {
      return stage.forecast ? stage.forecast->of(kind) : Bytes();
    });
  }
  table.add_line();
  add_row(table, plan, "at most, together",
          [](const StagePlan& stage) { return stage.forecast ? stage.forecast->total() : Bytes(); });
  if (!plan.request.device_memory) return;
  add_answers(table, fmt::format("fits {}", to_string(*plan.request.device_memory)),
              [&](int stage) { return plan.fits(stage); });
}

// A row for each kind of which the host or the drive holds any bytes, at any stage.
void add_tier(TextTable& table, const MemoryPlan& plan, memory::Tier tier, const char* name,
              const std::optional<Bytes>& room) {
  const auto holds = [&](const auto& of) {
    return std::ranges::any_of(plan.stages,
                               [&](const StagePlan& stage) { return of(stage) > Bytes(); });
  };
  const auto total = [&](const StagePlan& stage) { return stage.total_on(tier); };
  if (!room && !holds(total)) return;
  table.add_line();
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    const auto held = [&](const StagePlan& stage) { return stage.held_on(tier, kind); };
    if (holds(held)) add_row(table, plan, fmt::format("{}: {}", name, name_of(kind)), held);
  }
  add_row(table, plan, fmt::format("{}, together", name), total);
  if (!room) return;
  add_answers(table, fmt::format("fits {} {}", name, to_string(*room)),
              [&](int stage) { return plan.fits_on(tier, stage); });
}

TextTable table_of(const MemoryPlan& plan) {
  TextTable table({"each device holds", "stage 0", "stage 1", "stage 2", "stage 3"});
  add_device(table, plan);
  add_tier(table, plan, memory::Tier::kHost, "host", plan.request.host_memory);
  add_tier(table, plan, memory::Tier::kNvme, "NVMe", plan.request.nvme_space);
  return table;
}

// Advice on host and drive, which the ranks of a host share.
std::string shared_advice(const MemoryPlan& plan, memory::Tier tier, const char* what) {
  if (plan.fits_on(tier, plan.stage) != false) return "";
  return fmt::format("{} DOES NOT: {} of {} each are more than its {}\n", what,
                     count_of(static_cast<std::size_t>(plan.ranks_of_host), "rank"),
                     to_string(plan.own().total_on(tier)),
                     to_string(*plan.room_on(tier) * plan.ranks_of_host));
}

std::string advice_of(const MemoryPlan& plan) {
  const std::string shared = shared_advice(plan, memory::Tier::kHost, "the host") +
                             shared_advice(plan, memory::Tier::kNvme, "the drive");
  const std::optional<bool> own = plan.fits(plan.stage);
  if (!plan.request.device_memory && plan.own().lacking.empty()) return shared;
  if (own == true) return fmt::format("stage {} of the configuration fits\n", plan.stage) + shared;
  std::string text = fmt::format("stage {} of the configuration {}\n", plan.stage,
                                 own ? "DOES NOT FIT" : "is refused") +
                     shared;
  for (const bool all : {true, false}) {
    for (int stage = 0; stage < 4; ++stage) {
      if (plan.fits(stage) == true && (!all || plan.fits_all(stage)))
        return text + fmt::format("write \"stage\": {}, which does{}\n", stage,
                                  all ? "" : " on the device");
    }
  }
  if (!plan.request.device_memory) return text;
  return text +
         (plan.fits_from
              ? fmt::format("no stage does on {}; stage 3 does from {} ranks\n",
                            count_of(static_cast<std::size_t>(plan.request.job.world_size), "rank"),
                            *plan.fits_from)
              : "no stage does, nor on more ranks\n");
}

Json tier_of(const StagePlan& stage, memory::Tier tier) {
  Json json = {{"total", stage.total_on(tier).value}};
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    const Bytes bytes = stage.held_on(tier, kind);
    if (bytes.value > 0) json[std::string(name_of(kind))] = bytes.value;
  }
  return json;
}

template <typename Value>
Json value_or_null(const std::optional<Value>& value) {
  return value ? Json(*value) : Json();
}

Json bytes_or_null(const std::optional<Bytes>& bytes) {
  return bytes ? Json(bytes->value) : Json();
}

Json stage_of(const MemoryPlan& plan, int index) {
  const StagePlan& stage = plan.stages[static_cast<std::size_t>(index)];
  Json entry = {{"stage", index}};
  entry["fits"] = value_or_null(plan.fits(index));
  entry["refused"] = stage.refused.empty() ? Json() : Json(stage.refused);
  entry["lacking"] = stage.lacking.empty() ? Json() : Json(stage.lacking);
  entry["host_fits"] = value_or_null(plan.fits_on(memory::Tier::kHost, index));
  entry["nvme_fits"] = value_or_null(plan.fits_on(memory::Tier::kNvme, index));
  if (!stage.forecast) return entry;
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    if (is_planned(kind))
      entry["device"][std::string(name_of(kind))] = stage.forecast->of(kind).value;
  }
  entry["device"]["total"] = stage.forecast->total().value;
  entry["host"] = tier_of(stage, memory::Tier::kHost);
  entry["nvme"] = tier_of(stage, memory::Tier::kNvme);
  return entry;
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
  return entry.forecast->total() <= *request.device_memory;
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
  return Planner(request, model).run();
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
    const StagePlan& entry = plan.stages[stage];
    if (!entry.refused.empty())
      text += fmt::format("stage {} is refused: {}\n", stage, entry.refused);
    if (!entry.lacking.empty()) text += fmt::format("stage {}: {}\n", stage, entry.lacking);
  }
  text +=
      "Not counted: activations, gradients before they reach the engine, and what torch, the "
      "driver and\nthe collectives keep for themselves. Kinds are peaks of their own, and do not "
      "add up.\nHost and NVMe are of each rank, also while it loads or saves.\n";
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
               {"ranks_of_host", plan.ranks_of_host},
               {"host", tier_of(plan.own(), memory::Tier::kHost)},
               {"nvme", tier_of(plan.own(), memory::Tier::kNvme)},
               {"remarks", plan.remarks}};
  json["device_memory"] = bytes_or_null(plan.request.device_memory);
  json["host_memory"] = bytes_or_null(plan.request.host_memory);
  json["nvme_space"] = bytes_or_null(plan.request.nvme_space);
  json["host_fits"] = value_or_null(plan.fits_on(memory::Tier::kHost, plan.stage));
  json["nvme_fits"] = value_or_null(plan.fits_on(memory::Tier::kNvme, plan.stage));
  json["fits_from"] = value_or_null(plan.fits_from);
  for (int stage = 0; stage < 4; ++stage) json["stages"].push_back(stage_of(plan, stage));
  return json;
}

}  // namespace strata::cli

#include "strata/cli/memory_plan.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "strata/base/error.h"
#include "strata/cli/named_model.h"
#include "strata/engine/config/config.h"
#include "strata/engine/config/config_text.h"
#include "strata/forecast/auto_placement.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;

constexpr int kRanksMax = 65'536;  // that are tried

// A tier that the ranks of a host share.
struct SharedTier {
  memory::Tier tier;
  const char* key;       // in JSON: what it holds
  const char* fits_key;  // and whether that fits
  const char* label;     // of rows
  const char* noun;
  std::optional<Bytes> PlanRequest::*room;
};

constexpr std::array<SharedTier, 2> kSharedTiers{
    {{memory::Tier::kHost, "host", "host_fits", "host", "the host", &PlanRequest::host_memory},
     {memory::Tier::kNvme, "nvme", "nvme_fits", "NVMe", "the drive", &PlanRequest::nvme_space}}};

// Calls use(kind, name) for every kind.
template <typename Use>
void for_each_kind(const Use& use) {
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    use(kind, std::string(name_of(kind)));
  }
}

bool is_planned(memory::Kind kind) {
  return kind != memory::Kind::kWorkspace;  // memory of kernels is not planned
}

std::string ranks_text(int ranks) {
  return count_of(static_cast<std::size_t>(ranks), "rank");
}

Json bytes_or_null(const std::optional<Bytes>& bytes) {
  return bytes ? Json(bytes->value) : Json();
}

// Makes the plan of one request, as JSON. The remarks say what it assumes.
class Planner {
 public:
  explicit Planner(const PlanRequest& request)
      : request_(request),
        model_(read_model(request.model)),
        ranks_of_host_(forecast::ranks_of_a_host(request.job)) {}

  Json run() {
    read_document();
    engine::Config own = engine::Config::parse(engine::canonical_text(document_));
    stage_ = own.zero.stage;
    choose_rule(own);
    record_open(own);
    complete_batch(own);
    record_unbounded(own);
    Numel elements;
    Bytes weights;  // in the dtypes that the model computes in
    for (const plan::ParamSpec& spec : specs_of(own)) {
      elements += spec.numel();
      weights += bytes_of(spec.numel(), spec.dtype);
    }
    Json stages = Json::array();
    for (int stage = 0; stage < 4; ++stage) stages.push_back(stage_at(stage));
    const bool none_fits =
        std::none_of(stages.begin(), stages.end(), [](const Json& s) { return s["fits"] == true; });
    const bool more = request_.device_memory && none_fits && stages[3]["refused"].is_null();
    Json json = {{"model", request_.model},
                 {"world_size", request_.job.world_size},
                 {"parameters", model_.params.size()},
                 {"elements", elements.value},
                 {"weight_bytes", weights.value},
                 {"stage", stage_},
                 {"stages", stages},
                 {"fits_from", more ? find_world() : Json()},
                 {"ranks_of_host", ranks_of_host_},
                 {"device_memory", bytes_or_null(request_.device_memory)},
                 {"host_memory", bytes_or_null(request_.host_memory)},
                 {"nvme_space", bytes_or_null(request_.nvme_space)},
                 {"remarks", model_.remarks}};
    const Json& at_own = stages[static_cast<std::size_t>(stage_)];
    for (const SharedTier& tier : kSharedTiers) {
      json[tier.key] = at_own.value(tier.key, Json({{"total", 0}}));
      json[tier.fits_key] = at_own[tier.fits_key];
    }
    return json;
  }

 private:
  void remark(std::string text) { model_.remarks.push_back(std::move(text)); }

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

  // Null where a forecast does not say it.
  Json stage_at(int stage) const {
    Json entry = {{"stage", stage},     {"fits", nullptr},      {"refused", nullptr},
                  {"lacking", nullptr}, {"host_fits", nullptr}, {"nvme_fits", nullptr}};
    forecast::MemoryForecast found;
    try {
      found = forecast_at(config_at(stage), request_.job);
    } catch (const ConfigError& error) {
      if (stage == stage_) throw;
      entry["refused"] = error.what();
      return entry;
    } catch (const OutOfMemoryError& error) {  // where placement is automatic
      entry["lacking"] = error.what();
      entry["fits"] = false;
      return entry;
    }
    if (request_.device_memory) entry["fits"] = found.total() <= *request_.device_memory;
    entry["device"]["total"] = found.total().value;
    for_each_kind([&](memory::Kind kind, const std::string& name) {
      if (is_planned(kind)) entry["device"][name] = found.of(kind).value;
    });
    for (const SharedTier& tier : kSharedTiers) {
      const Bytes total = found.total_on(tier.tier);
      entry[tier.key]["total"] = total.value;
      for_each_kind([&](memory::Kind kind, const std::string& name) {
        const Bytes bytes = found.on(tier.tier, kind);
        if (bytes > Bytes()) entry[tier.key][name] = bytes.value;
      });
      if (const auto& room = request_.*tier.room)
        entry[tier.fits_key] = total <= *room / ranks_of_host_;
    }
    return entry;
  }

  // The least number of ranks, doubling, at which stage 3 fits; null: none.
  Json find_world() const {
    const engine::Config config = config_at(3);
    forecast::Job job = request_.job;
    if (job.ranks_per_host == 0) job.ranks_per_host = job.world_size;
    for (job.world_size *= 2; job.world_size <= kRanksMax; job.world_size *= 2) {
      try {
        if (forecast_at(config, job).total() <= *request_.device_memory) return job.world_size;
      } catch (const ConfigError&) {
        return nullptr;  // shard groups that do not come out even
      } catch (const OutOfMemoryError&) {
        continue;  // automatic placement has no room
      }
    }
    return nullptr;
  }

  const PlanRequest& request_;
  NamedModel model_;
  int ranks_of_host_;  // that share its memory and drives
  int stage_ = 0;      // the configuration's
  Json document_;
  engine::UpdateRule rule_ = engine::UpdateRule::kAdamW;
  engine::BatchSizes batch_;
};

std::string table_of(const PlanRequest& request, const Json& stages) {
  TextTable table({"each device holds", "stage 0", "stage 1", "stage 2", "stage 3"});
  const auto add_row = [&](std::string label, const auto& cell) {
    std::vector<std::string> row{std::move(label)};
    for (const Json& stage : stages) row.push_back(cell(stage));
    table.add(std::move(row));
  };
  const auto bytes = [](const Json& stage, const char* tier, const std::string& kind) {
    return stage.contains(tier) ? Bytes(stage[tier].value(kind, std::int64_t{0})) : Bytes();
  };
  const auto add_sizes = [&](std::string label, const char* tier, const std::string& kind) {
    add_row(std::move(label), [&](const Json& stage) {
      return stage.contains(tier) ? to_string(bytes(stage, tier, kind)) : "-";
    });
  };
  const auto add_answers = [&](std::string label, const char* key) {
    add_row(std::move(label), [&](const Json& stage) {
      return stage[key].is_null() ? "-" : stage[key].get<bool>() ? "yes" : "no";
    });
  };
  for_each_kind([&](memory::Kind kind, const std::string& name) {
    if (is_planned(kind)) add_sizes(name, "device", name);
  });
  table.add_line();
  add_sizes("at most, together", "device", "total");
  if (request.device_memory)
    add_answers(fmt::format("fits {}", to_string(*request.device_memory)), "fits");
  for (const SharedTier& tier : kSharedTiers) {
    const auto holds = [&](const std::string& kind) {
      return std::any_of(stages.begin(), stages.end(),
                         [&](const Json& stage) { return bytes(stage, tier.key, kind) > Bytes(); });
    };
    const std::optional<Bytes>& room = request.*tier.room;
    if (!room && !holds("total")) continue;
    table.add_line();
    for_each_kind([&](memory::Kind, const std::string& name) {
      if (holds(name)) add_sizes(fmt::format("{}: {}", tier.label, name), tier.key, name);
    });
    add_sizes(fmt::format("{}, together", tier.label), tier.key, "total");
    if (room) add_answers(fmt::format("fits {} {}", tier.label, to_string(*room)), tier.fits_key);
  }
  return table.text();
}

// Whatever was asked fits.
bool fits_all(const Json& stage) {
  return stage["fits"] != false && stage["host_fits"] != false && stage["nvme_fits"] != false;
}

std::string advice_of(const PlanRequest& request, const Json& plan) {
  const Json& stages = plan["stages"];
  const auto stage = plan["stage"].get<std::size_t>();
  const Json& own = stages[stage];
  std::string shared;
  for (const SharedTier& tier : kSharedTiers) {
    if (own[tier.fits_key] != false) continue;
    const auto ranks = plan["ranks_of_host"].get<int>();
    shared +=
        fmt::format("{} DOES NOT: {} of {} each are more than its {}\n", tier.noun,
                    ranks_text(ranks), to_string(Bytes(own[tier.key]["total"].get<std::int64_t>())),
                    to_string(*(request.*tier.room) / ranks * ranks));
  }
  if (!request.device_memory && own["lacking"].is_null()) return shared;
  if (own["fits"] == true)
    return fmt::format("stage {} of the configuration fits\n", stage) + shared;
  std::string text = fmt::format("stage {} of the configuration {}\n", stage,
                                 own["fits"].is_null() ? "is refused" : "DOES NOT FIT") +
                     shared;
  for (const bool all : {true, false}) {
    for (const Json& other : stages) {
      if (other["fits"] == true && (!all || fits_all(other)))
        return text + fmt::format("write \"stage\": {}, which does{}\n", other["stage"].get<int>(),
                                  all ? "" : " on the device");
    }
  }
  if (!request.device_memory) return text;
  if (plan["fits_from"].is_null()) return text + "no stage does, nor on more ranks\n";
  return text + fmt::format("no stage does on {}; stage 3 does from {} ranks\n",
                            ranks_text(request.job.world_size), plan["fits_from"].get<int>());
}

}  // namespace

Report make_plan(const PlanRequest& request) {
  const Json plan = Planner(request).run();
  const Json& stages = plan["stages"];
  std::string text = fmt::format(
      "{}: {} of {} elements, {} of weights\n{} at stage {} of the configuration, {}\n\n",
      request.model, count_of(plan["parameters"], "parameter"), with_commas(plan["elements"]),
      to_string(Bytes(plan["weight_bytes"].get<std::int64_t>())),
      ranks_text(request.job.world_size), plan["stage"].get<int>(),
      request.job.on_gpus ? "on GPUs" : "on CPUs");
  text += table_of(request, stages) + advice_of(request, plan) + "\n";
  for (const Json& stage : stages) {
    for (const auto& [key, verb] : {std::pair("refused", " is refused"), {"lacking", ""}}) {
      if (!stage[key].is_null())
        text += fmt::format("stage {}{}: {}\n", stage["stage"].get<int>(), verb,
                            stage[key].get<std::string>());
    }
  }
  text +=
      "Not counted: activations, gradients before they reach the engine, and what torch, the "
      "driver and\nthe collectives keep for themselves. Kinds are peaks of their own, and do not "
      "add up.\nHost and NVMe are of each rank, also while it loads or saves.\n";
  for (const Json& remark : plan["remarks"]) text += "- " + remark.get<std::string>() + "\n";
  return {plan, text, fits_all(stages[plan["stage"].get<std::size_t>()])};
}

}  // namespace strata::cli

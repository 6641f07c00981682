#include <fmt/core.h>

#include <algorithm>
#include <array>

#include "strata/base/error.h"
#include "strata/cli/commands.h"
#include "strata/engine/config/config.h"
#include "strata/engine/config/config_review.h"
#include "strata/engine/config/config_text.h"
#include "strata/forecast/auto_placement.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;

constexpr int kRanksMax = 65'536;  // that are tried

// Places of weights and of optimizer states, by DeepSpeed's names of devices; the fastest first.
struct GridPlace {
  const char* name;
  const char* weights;
  const char* states;
  int least_stage;
  const char* needs;              // the answer that must not be open
  const char* setting = nullptr;  // that is worth an attempt
};

constexpr std::array<GridPlace, 5> kGrid{{{"all on the device", "none", "none", 0, "fits"},
                                          {"optimizer on the host", "none", "cpu", 1, "host_fits",
                                           "zero_optimization.offload_optimizer.device \"cpu\""},
                                          {"all on the host", "cpu", "cpu", 3, "host_fits",
                                           "zero_optimization.offload_param.device and "
                                           "offload_optimizer.device \"cpu\""},
                                          {"optimizer on NVMe", "none", "nvme", 1, "nvme_fits"},
                                          {"all on NVMe", "nvme", "nvme", 3, "nvme_fits"}}};

// Where activations are estimated, this part of a device stays for torch, the driver and NCCL.
constexpr int kSpareParts = 20;
constexpr std::int64_t kLeastSeq = 1024;  // where only the longest rows are asked for

constexpr const char* kPlainConfig =
    R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}})";

Json bytes_or_null(const std::optional<Bytes>& bytes) {
  return bytes ? Json(bytes->value) : Json();
}

// Makes the plan of one request, as JSON. The remarks say what it assumes.
class Planner {
 public:
  explicit Planner(const PlanRequest& request)
      : request_(request),
        model_(read_model(request.model, request.trained)),
        ranks_of_host_(forecast::ranks_of_a_host(request.job)) {}

  Json run() {
    read_document();
    engine::Config own = engine::Config::parse(engine::canonical_text(document_));
    stage_ = own.zero.stage;
    choose_rule(own);
    record_open(own);
    complete_batch(own);
    record_unbounded(own);
    estimate_activations(own);
    Numel elements;
    Numel trained;
    Bytes weights;  // in the dtypes that the model computes in
    Json shapes = Json::object();
    for (const plan::ParamSpec& spec : specs_of(own)) {
      elements += spec.numel();
      if (spec.trainable) trained += spec.numel();
      weights += bytes_of(spec.numel(), spec.dtype);
      if (request_.shapes) shapes[spec.name] = {{"shape", spec.shape}, {"trained", spec.trainable}};
    }
    Json json = {{"model", request_.model},
                 {"world_size", request_.job.world_size},
                 {"parameters", model_.params.size()},
                 {"elements", elements.value},
                 {"trained_elements", trained.value},
                 {"weight_bytes", weights.value},
                 {"ranks_of_host", ranks_of_host_},
                 {"device_memory", bytes_or_null(request_.device_memory)},
                 {"host_memory", bytes_or_null(request_.host_memory)},
                 {"nvme_space", bytes_or_null(request_.nvme_space)},
                 {"remarks", model_.remarks}};
    if (request_.shapes) json["shapes"] = std::move(shapes);
    if (request_.grid)
      add_grid(json);
    else
      add_stages(json);
    return json;
  }

 private:
  void add_stages(Json& json) const {
    Json stages = Json::array();
    for (int stage = 0; stage < 4; ++stage)
      stages.push_back(entry_at(stage, document_at(stage), stage == stage_));
    const bool none_fits =
        std::none_of(stages.begin(), stages.end(), [](const Json& s) { return s["fits"] == true; });
    const bool more = request_.device_memory && none_fits && stages[3]["refused"].is_null();
    json["stage"] = stage_;
    json["fits_from"] = more ? find_world() : Json();
    const Json& at_own = stages[static_cast<std::size_t>(stage_)];
    for (const char* const key : {"activations", "longest"}) json[key] = at_own.value(key, Json());
    if (!json["longest"].is_null()) advise_offload(json["longest"]);
    for (const SharedTier& tier : kSharedTiers) {
      json[tier.key] = at_own.value(tier.key, Json({{"total", 0}}));
      json[tier.fits_key] = at_own[tier.fits_key];
    }
    json["stages"] = std::move(stages);
  }

  // Writes the first that fits to the file, if there is one.
  void add_grid(Json& json) const {
    Json& rows = json["grid"] = Json::array();
    json["best"] = json["longest_row"] = nullptr;
    std::int64_t longest = 0;
    for (const GridPlace& place : kGrid) {
      for (int stage = place.least_stage; stage < 4; ++stage) {
        const Json document = document_in(place, stage);
        Json row = entry_at(stage, document, /*required=*/false);
        row["placement"] = place.name;
        if (json["best"].is_null() && row["fits"] == true && fits_all(row) &&
            row[place.needs] == true) {
          json["best"] = rows.size();
          if (!request_.write.empty())
            write_whole(request_.write, engine::pretty_text(document), "--write");
        }
        const std::int64_t seq = row.value("longest", Json({{"seq", 0}}))["seq"];
        if (seq > longest && (place.needs == kGrid[0].needs || row[place.needs] == true)) {
          longest = seq;
          json["longest_row"] = rows.size();
        }
        rows.push_back(std::move(row));
      }
    }
    const Json& chosen = json["best"].is_null() ? json["longest_row"] : json["best"];
    const Json& row = rows[chosen.is_null() ? 0 : chosen.get<std::size_t>()];
    for (const char* const key : {"activations", "longest"}) json[key] = row.value(key, Json());
    if (!json["longest"].is_null()) json["longest"]["placement"] = row["placement"];
  }

  void remark(std::string text) { model_.remarks.push_back(std::move(text)); }

  void read_document() {
    document_ = engine::open_document(request_.config);
    engine::Config::parse(request_.config);  // errors by the configuration's own paths
    if (document_.contains("strata") && document_["strata"].is_object() &&
        document_["strata"].erase("wrap") > 0)
      remark(
          "strata.wrap names classes, which files do not tell: blocks are found by their numbers");
    if (request_.micro_batch > 0)
      document_["train_micro_batch_size_per_gpu"] = request_.micro_batch;
  }

  void choose_rule(const engine::Config& config) {
    if (!config.optimizer) {
      remark("the configuration names no optimizer: taken to be AdamW");
    } else if (!config.optimizer->in_own_kernel) {
      remark(fmt::format("what torch.optim.{} keeps of each parameter is not counted",
                         config.optimizer->torch_class));
      rule_ = engine::UpdateRule::kExternal;
    } else if (config.optimizer->torch_class == "Muon") {
      remark("Muon's matrices are found by names and shapes, AdamW updates the other parameters");
    } else if (config.optimizer->torch_class == "Lion") {
      rule_ = engine::UpdateRule::kLion;
    } else if (!config.optimizer->adam.decoupled) {
      rule_ = engine::UpdateRule::kAdam;
    }
  }

  // Settings that are planned with a default, and that a framework will fill in.
  void record_open(const engine::Config& config) {
    for (const engine::OpenSetting& setting : config.open) {
      if (setting.path == "bf16.enabled" || setting.path == "fp16.enabled")
        remark(fmt::format("{} is \"auto\", which a framework fills in: taken to be false here",
                           setting.path));
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

  void estimate_activations(const engine::Config& config) {
    if (config.sequence_parallel > 1 && model_.activations)
      require_heads(*model_.activations, config.sequence_parallel);
    if (request_.seq == 0 && !(request_.checkpointing && request_.device_memory)) return;
    if (!model_.activations)
      throw UsageError(
          "{}: activations are estimated for decoders whose config.json names a known "
          "model_type; leave it out to plan the engine's memory alone: path={}",
          request_.seq > 0 ? "--seq" : "--checkpointing", request_.model);
    settings_ = ActivationSettings(config, model_.params.front().dtype);
    settings_->on_gpu = request_.job.on_gpus;
    settings_->checkpointing = request_.checkpointing;
    const auto ranks = settings_->sequence_parallel;
    remark(fmt::format(
        "activations are an estimate: a micro-batch of {}{}, {} checkpointing, for an attention "
        "kernel that keeps no scores; a {}th of the device stays free for torch and the driver",
        settings_->micro_batch, ranks > 1 ? fmt::format(" on {} ranks together", ranks) : "",
        request_.checkpointing ? "with" : "without", kSpareParts));
  }

  // The engine leaves it for activations.
  ActivationRoom room_beside(const forecast::MemoryForecast& found) const {
    ActivationRoom room;
    if (const auto& memory = request_.device_memory)
      room.device = *memory - *memory / kSpareParts - found.total();
    if (const auto& memory = request_.host_memory)
      room.host = *memory / ranks_of_host_ - found.total_on(memory::Tier::kHost);
    return room;
  }

  ActivationBytes activations_beside(const forecast::MemoryForecast& found) const {
    if (!settings_) return {};
    return activation_bytes(*model_.activations, *settings_,
                            request_.seq > 0 ? request_.seq : kLeastSeq, room_beside(found));
  }

  bool fits_device(const forecast::MemoryForecast& found) const {
    const Bytes room = *request_.device_memory;
    return found.total() + activations_beside(found).total() <=
           (settings_ ? room - room / kSpareParts : room);
  }

  // The longest rows at the configuration's stage with values of the engine on the host.
  void advise_offload(Json& longest) const {
    for (const GridPlace& place : kGrid) {
      if (stage_ < place.least_stage || place.setting == nullptr) continue;
      const Json other = entry_at(stage_, document_in(place, stage_), /*required=*/false);
      const Json& most = longest["advice"].is_null() ? longest : longest["advice"];
      if (!other.contains("longest") || other["longest"]["seq"] <= most["seq"]) continue;
      longest["advice"] = other["longest"];
      longest["advice"]["setting"] = place.setting;
    }
  }

  Json document_at(int stage) const {
    Json json = document_;
    Json& zero = json["zero_optimization"];
    if (!zero.is_object()) zero = Json::object();
    zero["stage"] = stage;
    return json;
  }

  Json document_in(const GridPlace& place, int stage) const {
    Json json = document_at(stage);
    Json& zero = json["zero_optimization"];
    for (const char* const old : {"cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"})
      zero.erase(old);
    for (const auto& [section, device] :
         {std::pair("offload_param", place.weights), {"offload_optimizer", place.states}}) {
      Json own = zero.value(section, Json());
      zero.erase(section);
      if (device == std::string_view("none")) continue;
      if (!own.is_object()) own = Json::object();
      own["device"] = device;
      if (device == std::string_view("nvme") && !own.contains("nvme_path"))
        own["nvme_path"] = request_.nvme_path;
      zero[section] = std::move(own);
    }
    if (json.contains("strata") && json["strata"].is_object()) json["strata"].erase("placement");
    return json;
  }

  engine::Config config_of(const Json& document) const {
    engine::Config config = engine::Config::parse(engine::canonical_text(document));
    config.batch = batch_;
    return config;
  }

  std::vector<plan::ParamSpec> specs_of(const engine::Config& config) const {
    std::vector<plan::ParamSpec> specs = model_.params;
    for (plan::ParamSpec& spec : specs) {
      spec.dtype = config.precision.weight_dtype(spec.dtype);
      spec.trainable = spec.trainable && is_floating(spec.dtype);
    }
    if (config.optimizer && config.optimizer->torch_class == "Muon")
      plan::take_muon(specs, model_.tree);
    if (config.strata.states_8bit && plan::is_native(rule_))
      plan::take_8_bits(specs, model_.tree, config.strata.min_8bit_size);
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
  Json entry_at(int stage, const Json& document, bool required) const {
    Json entry = {{"stage", stage},     {"fits", nullptr},      {"refused", nullptr},
                  {"lacking", nullptr}, {"host_fits", nullptr}, {"nvme_fits", nullptr}};
    forecast::MemoryForecast found;
    try {
      found = forecast_at(config_of(document), request_.job);
    } catch (const ConfigError& error) {
      if (required) throw;
      entry["refused"] = error.what();
      return entry;
    } catch (const OutOfMemoryError& error) {  // where placement is automatic
      entry["lacking"] = error.what();
      entry["fits"] = false;
      return entry;
    }
    if (request_.device_memory) entry["fits"] = fits_device(found);
    const ActivationBytes activations = activations_beside(found);
    if (request_.seq > 0) entry["activations"] = json_of(activations);
    if (settings_ && request_.device_memory) {
      entry["longest"] = report_longest(*model_.activations, *settings_, room_beside(found),
                                        request_.job.world_size);
      entry["longest"].update({{"engine", found.total().value}, {"stage", stage}});
    }
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
        entry[tier.fits_key] =
            total + (tier.tier == memory::Tier::kHost ? activations.host : Bytes()) <=
            *room / ranks_of_host_;
    }
    return entry;
  }

  // The least number of ranks, doubling, at which stage 3 fits; null: none.
  Json find_world() const {
    const engine::Config config = config_of(document_at(3));
    forecast::Job job = request_.job;
    if (job.ranks_per_host == 0) job.ranks_per_host = job.world_size;
    for (job.world_size *= 2; job.world_size <= kRanksMax; job.world_size *= 2) {
      try {
        if (fits_device(forecast_at(config, job))) return job.world_size;
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
  std::optional<ActivationSettings> settings_;  // absent: activations are not asked for
};

}  // namespace

Report make_plan(const PlanRequest& given) {
  PlanRequest request = given;
  request.grid |= request.config.empty() || !request.write.empty();
  if (request.config.empty()) request.config = kPlainConfig;
  if (!request.write.empty() && !request.device_memory)
    throw UsageError("--write writes what fits: give --device-memory, as 80GiB, too");
  const Json plan = Planner(request).run();
  const bool right = request.grid ? !request.device_memory || !plan["best"].is_null()
                                  : fits_all(plan["stages"][plan["stage"].get<std::size_t>()]);
  return {plan, text_of_plan(request, plan), right};
}

}  // namespace strata::cli

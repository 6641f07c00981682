#include "strata/engine/config/config.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "strata/base/error.h"
#include "strata/engine/config/aliases.h"
#include "strata/engine/config/config_source.h"
#include "strata/engine/config/json_text.h"
#include "strata/engine/config/key.h"
#include "strata/engine/config/settings.h"
#include "strata/engine/config/value_check.h"

namespace strata::engine {
namespace {

using nlohmann::json;

json open_document(std::string_view text_or_path, ConfigFindings* remarks) {
  const ConfigSource source = open_config_source(text_or_path);
  json document = parse_json_text(source.text, source.origin);
  if (!document.is_object()) {
    throw ConfigError(fmt::format("{}: wanted an object {{ ... }} of settings; found {}",
                                  source.origin, shown(document)));
  }
  apply_aliases(&document, remarks);
  return document;
}

constexpr Numel kMaxLiveParameters(1'000'000'000);

constexpr std::string_view kMicsKey = "zero_optimization.mics_shard_size";
constexpr std::string_view kHpzKey = "zero_optimization.zero_hpz_partition_size";

void read_shard_groups(const Settings& s, ZeroConfig& zero) {
  const std::int64_t mics = s.integer(kMicsKey);
  const std::int64_t hpz = s.integer(kHpzKey);
  if (mics <= 0 && hpz <= 1) return;
  if (mics > 0 && hpz > 1) {
    throw ConfigError(fmt::format(
        "{}: contradicts {}, which shards gradients and optimizer state over all ranks; remove one "
        "of the two; found {} and {}",
        kMicsKey, kHpzKey, mics, hpz));
  }
  const std::string_view key = mics > 0 ? kMicsKey : kHpzKey;
  const std::int64_t size = std::max(mics, hpz);
  if (size > std::numeric_limits<int>::max())
    throw ConfigError(fmt::format("{}: wanted a number of ranks; found {}", key, size));
  if (zero.stage < 3) {
    throw ConfigError(fmt::format(
        "{}: shard groups are those of stage 3 (DeepSpeed does not look at the key below it, and "
        "shards over all ranks); write \"stage\": 3, or remove the key; found {} at stage {}",
        key, size, zero.stage));
  }
  zero.shard_group_size = static_cast<int>(size);
  zero.secondary_shards = hpz > 1;
}

ZeroConfig read_zero(const Settings& s) {
  const auto numel = [&s](const char* name) {
    return Numel(s.integer(join_path("zero_optimization", name)));
  };
  const bool sequential = s.flag("zero_optimization.stage3_allgather_sequential");
  const auto max_live = s.maybe<std::int64_t>("zero_optimization.stage3_max_live_parameters");
  const auto reuse = s.maybe<std::int64_t>("zero_optimization.stage3_max_reuse_distance");
  ZeroConfig zero{
      .stage = static_cast<int>(s.integer("zero_optimization.stage")),
      .reduce_bucket_size = numel("reduce_bucket_size"),
      .prefetch_bucket_size = numel("stage3_prefetch_bucket_size"),
      .param_persistence_threshold = numel("stage3_param_persistence_threshold"),
      .model_persistence_threshold = numel("stage3_model_persistence_threshold"),
      .max_live_parameters = max_live     ? Numel(*max_live)
                             : sequential ? numel("stage3_prefetch_bucket_size")
                                          : kMaxLiveParameters,
      .max_reuse_distance = reuse ? std::optional(Numel(*reuse)) : std::nullopt,
      .overlap_comm = s.maybe<bool>("zero_optimization.overlap_comm"),
      .allgather_sequential = sequential,
      .partition_stream_chunk =
          Bytes(s.integer("zero_optimization.stage3_partition_stream_chunk_size")),
      .gather_16bit_weights_on_model_save =
          s.flag("zero_optimization.stage3_gather_16bit_weights_on_model_save"),
      .ignore_unused_parameters = s.flag("zero_optimization.ignore_unused_parameters"),
      .sanity_checks = s.flag("zero_optimization.enable_sanity_checks"),
      .leaf = {.classes = s.texts("zero_optimization.leaf_module.classes"),
               .names = s.texts("zero_optimization.leaf_module.names"),
               .name_suffixes = s.texts("zero_optimization.leaf_module.name_suffixes")},
  };
  read_shard_groups(s, zero);
  return zero;
}

comm::TransportKind transport_of(const std::string& name) {
  using comm::TransportKind;
  return name == "peer"   ? TransportKind::kPeer
         : name == "nccl" ? TransportKind::kNccl
                          : TransportKind::kAuto;
}

comm::TransportSettings read_transports(const Settings& s) {
  using comm::CollectivesKind;
  const std::string how = s.text("strata.collectives");
  return {.collectives = how == "local"  ? CollectivesKind::kLocal
                         : how == "shm"  ? CollectivesKind::kShm
                         : how == "c10d" ? CollectivesKind::kC10d
                         : how == "nccl" ? CollectivesKind::kNccl
                         : how == "peer" ? CollectivesKind::kPeer
                                         : CollectivesKind::kAuto,
          .gather = transport_of(s.text("strata.gather")),
          .reduce = transport_of(s.text("strata.reduce"))};
}

StrataConfig read_strata(const Settings& s) {
  const auto bytes = [&s](const char* path) -> std::optional<Bytes> {
    const auto value = s.maybe<std::int64_t>(path);
    return value ? std::optional(Bytes(*value)) : std::nullopt;
  };
  const std::string refresh = s.text("strata.refresh_at");
  const std::string where = s.text("strata.device");
  const auto threads = s.maybe<std::int64_t>("strata.threads");
  return {.reduce_at =
              s.text("strata.reduce_at") == "boundary" ? ReduceAt::kBoundary : ReduceAt::kMicroStep,
          .refresh_at = refresh == "step"      ? LazyGather::kStep
                        : refresh == "forward" ? LazyGather::kForward
                                               : LazyGather::kAuto,
          .device = where == "cpu"    ? DeviceKind::kCpu
                    : where == "cuda" ? DeviceKind::kCuda
                                      : DeviceKind::kAuto,
          .transports = read_transports(s),
          .move_inputs = s.flag("strata.move_inputs"),
          .max_live = bytes("strata.max_live_bytes"),
          .wrap = s.texts("strata.wrap"),
          .unit_size = bytes("strata.unit_size"),
          .threads = threads ? std::optional(static_cast<int>(*threads)) : std::nullopt,
          .init_tier = s.text("strata.init.tier"),
          .replay_above = Numel(s.integer("strata.init.replay_above")),
          .init_read = s.text("strata.init.read"),
          .init_report = s.maybe<std::string>("strata.init.report"),
          .timeout_s = s.number("strata.timeout_s"),
          .decay_unused = s.flag("strata.decay_unused"),
          .max_skipped_steps = static_cast<int>(s.integer("strata.max_skipped_steps")),
          .trace = s.maybe<std::string>("strata.trace"),
          .trace_steps = static_cast<int>(s.integer("strata.trace_steps")),
          .tile_max = bytes("strata.tiles.max_gather"),
          .tile_matches = s.texts("strata.tiles.match")};
}

// Infinity, as frameworks write to silence the engine, means never.
std::optional<std::int64_t> read_steps_per_print(const Settings& s) {
  constexpr double kNever = 9e18;
  const auto steps = s.maybe<double>("steps_per_print");
  if (!steps || *steps >= kNever) return std::nullopt;
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(*steps));
}

// An optimizer section that does not say which optimizer, in a configuration of a training.
void record_missing_type(const json& document, ConfigFindings* remarks) {
  const auto section = document.find("optimizer");
  if (section == document.end() || section->is_null()) return;
  const auto params = section->find("params");
  const bool has_params = params != section->end() && params->is_object() && !params->empty();
  std::string sign = has_params ? "optimizer.params" : "";
  for (const char* name : {"scheduler", "gradient_clipping", "gradient_accumulation_steps"}) {
    const auto found = document.find(name);
    if (sign.empty() && found != document.end() && !found->is_null()) sign = name;
  }
  if (sign.empty()) return;
  remarks->open.push_back(
      {"optimizer.type",
       fmt::format("optimizer.type: wanted the optimizer's class, since {} is for training; write "
                   "\"type\": \"AdamW\", pass optimizer= to initialize, or remove the section "
                   "\"optimizer\" to evaluate only; found none",
                   sign)});
}

// "auto" that no other batch size settles: one pass a step would train something else.
void record_open_accumulation(const json& document, const BatchSizes& batch,
                              ConfigFindings* remarks) {
  constexpr std::string_view kKey = "gradient_accumulation_steps";
  const bool settled = batch.train_batch_size && batch.micro_batch_size;
  const auto given = document.find(std::string(kKey));
  if (settled || given == document.end() || *given != "auto") return;
  remarks->open.push_back(unresolved_auto(kKey, "passes of one step", "1"));
}

// Weights that groups of ranks hold, or that peers are told to read, stay on the device. Settings
// that "auto" ignores, and settings that only "auto" reads, are hints.
void restrict_automatic(Config& config, const Settings& s, ConfigFindings* remarks) {
  OffloadConfig& offload = config.offload;
  const comm::TransportSettings& transports = config.strata.transports;
  if (config.zero.shard_group_size != 0 || transports.gather == comm::TransportKind::kPeer ||
      transports.collectives == comm::CollectivesKind::kPeer)
    offload.places_weights = false;
  const auto note = [&](std::string_view path, bool given, std::string_view reason) {
    if (given) remarks->hints.push_back({std::string(path), std::string(reason)});
  };
  if (offload.automatic) {
    for (const std::string_view section : {"offload_param", "offload_optimizer"}) {
      const std::string path = fmt::format("zero_optimization.{}.device", section);
      note(path, s.text(path) != "none", "strata.placement is \"auto\", which chooses places");
    }
    constexpr std::string_view kRatio = "zero_optimization.offload_optimizer.ratio";
    note(kRatio, s.number(kRatio) < 1.0, "strata.placement is \"auto\", which chooses places");
  } else {
    constexpr std::string_view kReason = "it is for strata.placement \"auto\"";
    note("strata.device_budget", offload.device_budget.has_value(), kReason);
    note("strata.host_budget", offload.host_budget.has_value(), kReason);
  }
}

void record_tiles(const Config& config, ConfigFindings* remarks) {
  if (config.strata.tile_max && config.zero.stage != 3)
    remarks->hints.push_back({"strata.tiles", "parameters stay whole at stages 0 to 2"});
}

bool is_in(std::string_view path, std::string_view section) {
  return section.empty() || path == section ||
         (path.starts_with(section) && path.substr(section.size()).starts_with('.'));
}

}  // namespace

Config Config::parse(std::string_view text_or_path) {
  ConfigFindings remarks;
  const json document = open_document(text_or_path, &remarks);
  Config config;
  Settings s;
  read_settings(config_keys(), document, "", &s, &remarks);
  config.zero = read_zero(s);
  config.offload = read_offload(s, config.zero.stage, &remarks);
  config.precision = read_precision(s);
  config.strata = read_strata(s);
  restrict_automatic(config, s, &remarks);
  record_tiles(config, &remarks);
  config.strata.transports.joint_gathers = config.offload.offloads_params();
  config.batch = {.train_batch_size = s.maybe<std::int64_t>("train_batch_size"),
                  .micro_batch_size = s.maybe<std::int64_t>("train_micro_batch_size_per_gpu"),
                  .accumulation_steps = s.maybe<std::int64_t>("gradient_accumulation_steps")};
  record_open_accumulation(document, config.batch, &remarks);
  config.gradient_clipping = s.number("gradient_clipping");
  config.gradient_op =
      s.text("gradient_allreduce_op") == "sum" ? GradientOp::kSum : GradientOp::kMean;
  config.steps_per_print = read_steps_per_print(s);
  config.async_checkpoints = s.flag("checkpoint.async");
  config.keep_checkpoints = static_cast<int>(s.integer("checkpoint.keep"));
  config.managed_accumulation = s.flag("managed_gradient_accumulation");
  config.drop_last = s.flag("dataloader_drop_last");
  const bool has_optimizer = !s.at("optimizer.type").is_null();
  const bool has_scheduler = !s.at("scheduler.type").is_null();
  s.at("optimizer.params");
  s.at("scheduler.params");
  if (has_optimizer) config.optimizer = read_optimizer(&s, &remarks);
  if (!has_optimizer) record_missing_type(document, &remarks);
  if (has_scheduler) config.torch_scheduler = read_torch_scheduler(&s, &remarks);
  if (has_scheduler && !config.torch_scheduler) config.scheduler = read_scheduler(&s, &remarks);
  STRATA_ASSERT(s.first_unread().empty());
  config.hints = std::move(remarks.hints);
  config.hint_values = std::move(remarks.hint_values);
  config.open = std::move(remarks.open);
  config.shown = std::move(remarks.shown);
  config.shown_given = std::move(remarks.shown_given);
  config.settings_ = s.canonical();
  return config;
}

void Config::complete_batch(int world_size) {
  batch = complete_batch_sizes(batch, world_size);
  settings_["train_batch_size"] = fmt::format("{}", *batch.train_batch_size);
  settings_["train_micro_batch_size_per_gpu"] = fmt::format("{}", *batch.micro_batch_size);
  settings_["gradient_accumulation_steps"] = fmt::format("{}", *batch.accumulation_steps);
}

void Config::require_filled_in(std::string_view section) const {
  for (const OpenSetting& setting : open) {
    if (is_in(setting.path, section)) throw ConfigError(setting.problem);
  }
}

void Config::require_for_training(bool own_optimizer, bool own_scheduler) const {
  for (const OpenSetting& setting : open) {
    if (own_optimizer && is_in(setting.path, "optimizer")) continue;
    if (own_scheduler && is_in(setting.path, "scheduler")) continue;
    throw ConfigError(setting.problem);
  }
}

int Config::shard_group_size(int world_size) const {
  const int size = zero.shard_group_size;
  if (size == 0) return world_size;
  if (world_size % size == 0) return size;
  throw ConfigError(fmt::format(
      "{}: shard groups must be of equal size, so it must divide the number of ranks; write a "
      "divisor of {}, or {} for no groups; found {} for {} ranks",
      zero.secondary_shards ? kHpzKey : kMicsKey, world_size, zero.secondary_shards ? 1 : -1, size,
      world_size));
}

std::string Config::digest() const {
  std::string text;
  for (const auto& [path, value] : settings_) text += fmt::format("{} = {}\n", path, value);
  return text;
}

}  // namespace strata::engine

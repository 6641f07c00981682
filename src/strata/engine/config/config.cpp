#include "strata/engine/config/config.h"

#include <fmt/core.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "strata/base/error.h"
#include "strata/engine/config/config_text.h"
#include "strata/engine/config/key.h"
#include "strata/engine/config/settings.h"

namespace strata::engine {
namespace {

using nlohmann::json;

constexpr Numel kMaxLiveParameters(1'000'000'000);

constexpr std::string_view kMicsKey = "zero_optimization.mics_shard_size";
constexpr std::string_view kHpzKey = "zero_optimization.zero_hpz_partition_size";

void read_shard_groups(const Settings& s, ZeroConfig& zero) {
  const std::int64_t mics = s.integer(kMicsKey);
  const std::int64_t hpz = s.integer(kHpzKey);
  if (mics <= 0 && hpz <= 1) return;
  if (mics > 0 && hpz > 1)
    throw ConfigError(
        "{}: contradicts {}, which shards gradients and optimizer state over all ranks; remove one "
        "of the two; found {} and {}",
        kMicsKey, kHpzKey, mics, hpz);
  const std::string_view key = mics > 0 ? kMicsKey : kHpzKey;
  const std::int64_t size = std::max(mics, hpz);
  if (size > std::numeric_limits<int>::max())
    throw ConfigError("{}: wanted a number of ranks; found {}", key, size);
  if (zero.stage < 3)
    throw ConfigError(
        "{}: shard groups are those of stage 3 (DeepSpeed does not look at the key below it, and "
        "shards over all ranks); write \"stage\": 3, or remove the key; found {} at stage {}",
        key, size, zero.stage);
  zero.shard_group_size = static_cast<int>(size);
  zero.secondary_shards = hpz > 1;
}

ZeroConfig read_zero(const Settings& s) {
  ZeroConfig zero;
  const auto read = [&s](std::string_view name, auto& field) {
    s.read(join_path("zero_optimization", name), field);
  };
  std::optional<Numel> max_live;
  read("stage", zero.stage);
  read("reduce_bucket_size", zero.reduce_bucket_size);
  read("stage3_prefetch_bucket_size", zero.prefetch_bucket_size);
  read("stage3_param_persistence_threshold", zero.param_persistence_threshold);
  read("stage3_model_persistence_threshold", zero.model_persistence_threshold);
  read("stage3_max_live_parameters", max_live);
  read("stage3_max_reuse_distance", zero.max_reuse_distance);
  read("overlap_comm", zero.overlap_comm);
  read("stage3_allgather_sequential", zero.allgather_sequential);
  read("stage3_partition_stream_chunk_size", zero.partition_stream_chunk);
  read("stage3_gather_16bit_weights_on_model_save", zero.gather_16bit_weights_on_model_save);
  read("ignore_unused_parameters", zero.ignore_unused_parameters);
  read("enable_sanity_checks", zero.sanity_checks);
  read("leaf_module.classes", zero.leaf.classes);
  read("leaf_module.names", zero.leaf.names);
  read("leaf_module.name_suffixes", zero.leaf.name_suffixes);
  zero.max_live_parameters =
      max_live.value_or(zero.allgather_sequential ? zero.prefetch_bucket_size : kMaxLiveParameters);
  read_shard_groups(s, zero);
  return zero;
}

StrataConfig read_strata(const Settings& s) {
  StrataConfig config;
  const auto read = [&s](std::string_view name, auto& field) {
    s.read(join_path("strata", name), field);
  };
  read("reduce_at", config.reduce_at);
  read("refresh_at", config.refresh_at);
  read("update", config.update);
  read("update_at", config.update_at);
  read("min_8bit_size", config.min_8bit_size);
  read("keep_small_moments", config.keep_small_moments);
  read("state_cache", config.state_cache);
  read("device", config.device);
  read("collectives", config.transports.collectives);
  read("gather", config.transports.gather);
  read("reduce", config.transports.reduce);
  read("move_inputs", config.move_inputs);
  read("cuda_graphs", config.cuda_graphs);
  read("max_live_bytes", config.max_live);
  read("wrap", config.wrap);
  read("unit_size", config.unit_size);
  read("threads", config.threads);
  read("init.tier", config.init_tier);
  read("init.replay_above", config.replay_above);
  read("init.read", config.init_read);
  read("init.report", config.init_report);
  read("loss", config.loss);
  read("mlp_piece", config.mlp_piece);
  read("activations.device", config.activations);
  if (s.flag("activation_checkpointing.cpu_checkpointing")) {
    if (config.activations == "device")
      throw ConfigError(
          "activation_checkpointing.cpu_checkpointing: true contradicts strata.activations.device "
          "\"device\"; write one of them");
    config.activations = "cpu";
  }
  read("timeout_s", config.timeout_s);
  read("decay_unused", config.decay_unused);
  read("max_skipped_steps", config.max_skipped_steps);
  read("trace", config.trace);
  read("trace_steps", config.trace_steps);
  read("tiles.max_gather", config.tile_max);
  read("tiles.match", config.tile_matches);
  return config;
}

// Infinity, as frameworks write to silence the engine, means never.
std::optional<std::int64_t> read_steps_per_print(const Settings& s) {
  constexpr double kNever = 9e18;
  const auto steps = s.maybe<double>("steps_per_print");
  if (!steps || *steps >= kNever) return std::nullopt;
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(*steps));
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
  const auto note = [&](std::string_view path, bool given) {
    constexpr std::string_view kChosen = "strata.placement is \"auto\", which chooses places";
    constexpr std::string_view kOfAuto = "it is for strata.placement \"auto\"";
    if (given)
      remarks->hints.push_back(
          {std::string(path), std::string(offload.automatic ? kChosen : kOfAuto)});
  };
  if (offload.automatic) {
    for (const std::string_view section : {"offload_param", "offload_optimizer"}) {
      const std::string path = fmt::format("zero_optimization.{}.device", section);
      note(path, s.text(path) != "none");
    }
    constexpr std::string_view kRatio = "zero_optimization.offload_optimizer.ratio";
    note(kRatio, s.number(kRatio) < 1.0);
  } else {
    note("strata.device_budget", offload.device_budget.has_value());
    note("strata.host_budget", offload.host_budget.has_value());
  }
}

bool is_in(std::string_view path, std::string_view section) {
  return section.empty() || path == section ||
         (path.starts_with(section) && path.substr(section.size()).starts_with('.'));
}

std::string size_text(const std::optional<std::int64_t>& v) {
  return v ? fmt::format("{}", *v) : std::string("not given");
}

std::string given_text(const BatchSizes& given, int world_size) {
  return fmt::format(
      "train_batch_size: {}, train_micro_batch_size_per_gpu: {}, gradient_accumulation_steps: {}, "
      "world size: {}",
      size_text(given.train_batch_size), size_text(given.micro_batch_size),
      size_text(given.accumulation_steps), world_size);
}

// The product of the three, or nothing when it is beyond any real batch.
std::optional<std::int64_t> product(std::int64_t micro, std::int64_t steps, std::int64_t world) {
  constexpr std::int64_t kMost = std::int64_t{1} << 62;
  if (micro > kMost / steps || micro * steps > kMost / world) return std::nullopt;
  return micro * steps * world;
}

}  // namespace

BatchSizes BatchSizes::complete(int world_size) const {
  STRATA_ASSERT(world_size >= 1);
  const auto& [train, micro, steps] = *this;
  BatchSizes all = *this;
  if (!train && !micro)
    throw ConfigError(
        "train_batch_size: wanted it or train_micro_batch_size_per_gpu, since accumulation alone "
        "says nothing of the batch; add \"train_micro_batch_size_per_gpu\"; found {}",
        given_text(*this, world_size));
  if (train && micro && !steps) {
    all.accumulation_steps = *train / *micro / world_size;
  } else if (train && !micro) {
    all.accumulation_steps = steps.value_or(1);
    all.micro_batch_size = *train / world_size / *all.accumulation_steps;
  } else if (!train) {
    all.accumulation_steps = steps.value_or(1);
    all.train_batch_size = product(*micro, *all.accumulation_steps, world_size);
  }
  const bool holds =
      all.train_batch_size && *all.micro_batch_size > 0 && *all.accumulation_steps > 0 &&
      product(*all.micro_batch_size, *all.accumulation_steps, world_size) == all.train_batch_size;
  if (!holds)
    throw ConfigError(
        "train_batch_size: does not equal train_micro_batch_size_per_gpu x "
        "gradient_accumulation_steps x world size: {} != {} x {} x {}; correct one of them or "
        "remove it and let the others give it; found {}",
        size_text(all.train_batch_size), *all.micro_batch_size, *all.accumulation_steps, world_size,
        given_text(*this, world_size));
  return all;
}

Config Config::parse(std::string_view text_or_path) {
  ConfigFindings remarks;
  nlohmann::ordered_json written = open_document(text_or_path);
  apply_aliases(&written, &remarks);
  const json document = written;
  Config config;
  Settings s;
  read_settings(config_keys(), document, "", &s, &remarks);
  config.zero = read_zero(s);
  config.offload = read_offload(s, config.zero.stage, &remarks);
  config.precision = read_precision(s);
  config.strata = read_strata(s);
  restrict_automatic(config, s, &remarks);
  if (config.strata.tile_max && config.zero.stage != 3)
    remarks.hints.push_back({"strata.tiles", "parameters stay whole at stages 0 to 2"});
  config.strata.transports.joint_gathers = config.offload.offloads_params();
  s.read("train_batch_size", config.batch.train_batch_size);
  s.read("train_micro_batch_size_per_gpu", config.batch.micro_batch_size);
  s.read("gradient_accumulation_steps", config.batch.accumulation_steps);
  record_open_accumulation(document, config.batch, &remarks);
  s.read("gradient_clipping", config.gradient_clipping);
  s.read("gradient_allreduce_op", config.gradient_op);
  s.read("checkpoint.async", config.async_checkpoints);
  s.read("checkpoint.keep", config.keep_checkpoints);
  s.read("managed_gradient_accumulation", config.managed_accumulation);
  if (config.strata.update_at == UpdateAt::kBackward)
    require_no_late_factor(config.precision, config.gradient_clipping, config.managed_accumulation);
  s.read("dataloader_drop_last", config.drop_last);
  s.read("strata.sequence_parallel.size", config.sequence_parallel);
  const auto by_deepspeed = std::max(std::int64_t{1}, s.integer("sequence_parallel_size"));
  if (config.sequence_parallel == 1) config.sequence_parallel = by_deepspeed;
  if (by_deepspeed != 1 && by_deepspeed != config.sequence_parallel)
    throw ConfigError(
        "sequence_parallel_size: contradicts strata.sequence_parallel.size; write one of them; "
        "found {} and {}",
        by_deepspeed, config.sequence_parallel);
  config.steps_per_print = read_steps_per_print(s);
  const bool has_optimizer = !s.at("optimizer.type").is_null();
  const bool has_scheduler = !s.at("scheduler.type").is_null();
  s.at("optimizer.params");
  s.at("scheduler.params");
  if (has_optimizer) config.optimizer = read_optimizer(&s, &remarks);
  config.strata.states_8bit = has_states_8bit(s, config.optimizer);
  if (!has_optimizer) record_missing_type(document, &remarks);
  if (has_scheduler) config.torch_scheduler = read_torch_scheduler(&s, &remarks);
  if (has_scheduler && !config.torch_scheduler) config.scheduler = read_scheduler(&s, &remarks);
  STRATA_ASSERT(s.first_unread().empty());
  static_cast<ConfigRemarks&>(config) = std::move(remarks);
  config.settings_ = s.canonical();
  return config;
}

void Config::complete_batch(int world_size) {
  if (world_size % sequence_parallel != 0)
    throw ConfigError(
        "strata.sequence_parallel.size: must divide the {} ranks, whose groups share rows; found "
        "{}",
        world_size, sequence_parallel);
  batch = batch.complete(world_size / static_cast<int>(sequence_parallel));
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
  throw ConfigError(
      "{}: shard groups must be of equal size, so it must divide the number of ranks; write a "
      "divisor of {}, or {} for no groups; found {} for {} ranks",
      zero.secondary_shards ? kHpzKey : kMicsKey, world_size, zero.secondary_shards ? 1 : -1, size,
      world_size);
}

std::string Config::digest() const {
  std::string text;
  for (const auto& [path, value] : settings_) text += fmt::format("{} = {}\n", path, value);
  return text;
}

plan::PlanOptions plan_options_from(const Config& config) {
  plan::PlanOptions options;
  options.wrap = config.strata.wrap;
  options.leaves = config.zero.leaf;
  if (config.strata.unit_size) {
    options.unit_bytes = *config.strata.unit_size;
    options.block_unit_bytes = *config.strata.unit_size;
  }
  if (config.zero.stage == 3) {
    options.one_by_one = config.zero.allgather_sequential;
    if (config.strata.unit_size)
      options.small_bytes = std::min(options.small_bytes, *config.strata.unit_size);
    options.persistence_threshold = config.zero.param_persistence_threshold;
    options.persistence_total = config.zero.model_persistence_threshold;
    // strata.max_live_bytes does not change the units: strata.unit_size sets their size.
    if (!config.strata.max_live) options.shared_numel = config.zero.max_live_parameters;
  }
  return options;
}

}  // namespace strata::engine

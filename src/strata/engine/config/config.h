// Config: a DeepSpeed JSON configuration as typed values. parse() accepts every key of DeepSpeed
// 0.19's table (docs/CONFIG.md): a key is honoured and lands in a field here, or is a hint without
// effect and is listed in `hints` (to be shown once), or is refused. An unknown key is refused with
// the nearest known; at the top level, one that resembles no key is the user's own, and a hint.
// Threads: values; safe everywhere. Errors: ConfigError "json.path: wanted ...; found ...".
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "strata/base/units.h"
#include "strata/comm/transports.h"
#include "strata/engine/config/offload_config.h"
#include "strata/engine/config/optimizer_config.h"
#include "strata/engine/config/precision_config.h"
#include "strata/engine/config/remarks.h"
#include "strata/plan/init_plan.h"
#include "strata/plan/unit_plan.h"

namespace strata::engine {

struct ZeroConfig {
  int stage = 0;
  Numel reduce_bucket_size;
  Numel prefetch_bucket_size;
  Numel param_persistence_threshold;
  Numel model_persistence_threshold;
  Numel max_live_parameters;
  std::optional<Numel> max_reuse_distance;
  std::optional<bool> overlap_comm;
  bool allgather_sequential = false;
  Bytes partition_stream_chunk;  // of values that are sharded piece by piece
  bool gather_16bit_weights_on_model_save = false;
  bool ignore_unused_parameters = true;
  bool sanity_checks = false;
  plan::LeafModules leaf;
  // Ranks of a shard group (mics_shard_size, zero_hpz_partition_size); 0: one group of all.
  int shard_group_size = 0;
  // Each group holds the weights, and no more: the rest is sharded over all ranks (ZeRO++).
  bool secondary_shards = false;
};

enum class GradientOp : std::uint8_t { kMean, kSum };
enum class ReduceAt : std::uint8_t { kMicroStep, kBoundary };
enum class LazyGather : std::uint8_t { kAuto, kStep, kForward };
enum class UpdateWhere : std::uint8_t { kAuto, kDevice, kHost };
enum class UpdateAt : std::uint8_t { kStep, kBackward };
enum class DeviceKind : std::uint8_t { kAuto, kCpu, kCuda };

// The section "strata".
struct StrataConfig {
  ReduceAt reduce_at = ReduceAt::kMicroStep;
  LazyGather refresh_at = LazyGather::kAuto;
  UpdateWhere update = UpdateWhere::kAuto;
  UpdateAt update_at = UpdateAt::kStep;
  bool states_8bit = false;           // of the optimizer, where they may
  std::int64_t min_8bit_size = 4096;  // elements of a parameter
  bool keep_small_moments = true;
  std::optional<Bytes> state_cache;  // absent: no bound
  DeviceKind device = DeviceKind::kAuto;
  comm::TransportSettings transports;  // collectives, gather, reduce
  bool move_inputs = true;             // of the host, to the model's device
  bool cuda_graphs = false;            // may be made of compiled modules
  std::optional<Bytes> max_live;       // absent: from zero.max_live_parameters
  std::vector<std::string> wrap;       // empty: blocks are found by themselves
  std::optional<Bytes> unit_size;      // absent: the engine's own
  std::optional<int> threads;          // absent: cores over ranks
  plan::InitTier init_tier = plan::InitTier::kAuto;
  Numel replay_above;  // elements of a parameter whose constructors are replayed
  io::ReadWay init_read = io::ReadWay::kAuto;
  std::optional<std::string> init_report;  // a file; absent: none
  std::string loss = "auto";               // or "fused", "plain"
  std::string activations = "auto";        // where inputs of checkpoints stay; or "cpu", "device"
  std::optional<std::int64_t> mlp_piece;   // tokens; 0: all; absent: by memory
  double timeout_s = 300.0;
  bool decay_unused = false;         // parameters without a gradient decay, too
  int max_skipped_steps = 20;        // in a row, for gradients that are not finite
  std::optional<std::string> trace;  // the file of the timeline; absent: none
  int trace_steps = 3;
  std::optional<Bytes> tile_max;          // absent: by what the device has
  std::vector<std::string> tile_matches;  // patterns of names; empty: all
};

// Batch sizes: train_batch_size = micro-batch x accumulation steps x world size. As given, absent
// where it is not; all three are present after complete().
struct BatchSizes {
  std::optional<std::int64_t> train_batch_size;
  std::optional<std::int64_t> micro_batch_size;
  std::optional<std::int64_t> accumulation_steps;

  bool operator==(const BatchSizes&) const = default;

  // Completes by DeepSpeed's rules: any two give the third; a batch or a micro-batch alone means
  // accumulation 1. Sizes that do not divide evenly are refused, never rounded. Errors: ConfigError
  // with the equation.
  BatchSizes complete(int world_size) const;
};

struct Config : ConfigRemarks {
  // `text_or_path`: JSON text, the path of a JSON file, or urlsafe base64 of JSON text.
  static Config parse(std::string_view text_or_path);

  // Fills `batch` in for this many ranks. Errors: ConfigError with the equation that does not hold,
  // and where sequence_parallel does not divide the ranks.
  void complete_batch(int world_size);

  // Ranks of a shard group where there are this many in all. Errors: ConfigError where that does
  // not come out even.
  int shard_group_size(int world_size) const;

  comm::Slices slices() const {
    return zero.secondary_shards ? comm::Slices::kSecondary : comm::Slices::kReplicated;
  }

  // For code that needs the settings of `section` ("optimizer", "gradient_clipping"; "": all):
  // throws ConfigError if one of them is missing, or is still "auto", which a caller had to
  // replace.
  void require_filled_in(std::string_view section) const;
  // The same for a start, which needs all of them but those of sections in whose place the caller
  // has something of its own.
  void require_for_training(bool own_optimizer, bool own_scheduler) const;

  // One line "path = value" a setting, sorted by path, defaults included; hints, and what only says
  // what a rank shows, are left out. Ranks that got the same configuration have the same digest.
  std::string digest() const;

  ZeroConfig zero;
  OffloadConfig offload;
  PrecisionConfig precision;
  BatchSizes batch;
  bool managed_accumulation = true;  // false: every step() is a boundary
  double gradient_clipping = 1.0;    // 0: none
  GradientOp gradient_op = GradientOp::kMean;
  std::optional<std::int64_t> steps_per_print;  // absent: never
  bool async_checkpoints = false;
  int keep_checkpoints = 0;  // 0: all
  bool drop_last = false;
  std::int64_t sequence_parallel = 1;  // ranks that share rows
  std::optional<OptimizerConfig> optimizer;
  std::optional<SchedulerConfig> scheduler;             // absent also while a setting of it is open
  std::optional<TorchSchedulerConfig> torch_scheduler;  // in its place
  StrataConfig strata;

 private:
  std::map<std::string, std::string> settings_;  // path to canonical text, for digest()
};

// How the configuration wants a model cut into units.
plan::PlanOptions plan_options_from(const Config& config);

}  // namespace strata::engine

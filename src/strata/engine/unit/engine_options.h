// The settings that the engine's parts read, in their own units. engine_options_from() derives them
// from a Config; tests and programs without a configuration file set them by hand. Immutable value.
// The functions are pure arithmetic on options and plan, the same for the engine and its forecast.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/error.h"
#include "strata/base/units.h"
#include "strata/engine/config/config.h"
#include "strata/memory/ledger.h"
#include "strata/offload/make_store.h"
#include "strata/plan/unit_plan.h"

namespace strata::engine {

// The processors that update states which rest in host memory, if the device runs ahead.
struct UpdateLanes {
  UpdateWhere which = UpdateWhere::kAuto;  // auto: both, by their speeds
  int threads = 1;                         // of this rank, on the host
  std::vector<int> cores;                  // of these threads; empty: any
  Numel part{8 << 20};  // elements that one lane takes at once; a multiple of 2^15
  // Tests: parts are dealt by random numbers.
  std::optional<std::uint64_t> seed;
  Bytes cache{};  // of states in free memory of the device (optimize/state_cache.h); 0: none
};

struct EngineOptions {
  std::string name = "engine";  // tells the engines of one process apart; the same on every rank
  int stage = 3;  // below 3 the weights of every unit stay whole; at 3 those of persistent units
  // Gradients are reduced once, at the accumulation boundary, and every unit's whole gradient is
  // kept until then. False: after every micro-step, with the same bits at every stage.
  bool reduce_at_boundary = false;
  // Weights that stay whole are brought up to date beside the next forward, each unit when it is
  // used; otherwise before the step ends. Absent: beside it where the device runs ahead.
  std::optional<bool> gather_lazily;
  bool sum_gradients = false;                  // over ranks; else the mean
  DType reduce_dtype = DType::kFloat32;        // of flat gradient buffers, on the wire
  DType accumulation_dtype = DType::kFloat32;  // of reduced gradients kept between micro-steps
  memory::Tier gradient_tier = memory::Tier::kDevice;  // of reduced gradients; or the host
  // On the host, sums that are numbers of 16 bits rest in 16 bits: for one rank and one pass a
  // step.
  bool gradients_in_16 = false;
  offload::StatePlacement states;   // what the optimizer keeps, and masters
  offload::StatePlacement weights;  // of units that are sharded (stage 3) and not persistent
  std::optional<Bytes> staging;     // of both; absent: the sum of their budgets
  bool offloads_weights() const { return weights.offloads(); }
  // Whether any state rests elsewhere than on the device.
  bool offloads() const {
    return states.offloads() || weights.offloads() || gradient_tier == memory::Tier::kHost;
  }
  UpdateLanes lanes;
  // In the backward pass that ends a step units are updated one by one, as soon as their gradients
  // are complete. Only without clipping and check_finite, for the engine's own rules.
  bool update_in_backward = false;
  // bf16 weights are updated in fp32 and rounded at each step, without any kept master. Then their
  // moments may be bf16, too.
  bool rounds_masters = false;
  DType moment_dtype = DType::kFloat32;
  // Second moments in 8 bits that are positive stay so (kernels/states8.h).
  bool keeps_positive = true;
  // The bound on gathered weights; the units of one scope are gathered even if they exceed it.
  Bytes max_live = 2_GiB;
  // False: the next unit is prefetched while this one computes, even if they exceed the bound.
  bool max_live_is_hard = true;
  // Gathered weights are released if more elements than this come before their next use; absent:
  // never.
  std::optional<Numel> max_reuse;
  // The units of one scope may be prefetched together, even if they exceed `prefetch`.
  bool fetches_scopes = true;
  Bytes prefetch = 128_MiB;        // how much is fetched ahead of its use: the next unit, or more
  Bytes max_reducing = 512_MiB;    // gradient buffers under reduction before the next one waits
  double gradient_clipping = 0.0;  // global L2 norm; 0: none
  // False: a trainable parameter without a gradient is an error at the step.
  bool allow_unused = true;
  // A parameter for which no rank has a gradient in a step gets one of zeroes, so that it decays
  // and its momentum continues. False: it is not updated, and the step does not count for it.
  bool decay_unused = false;
  // The norm is computed without a host wait. Absent: where the device runs ahead.
  std::optional<bool> late_norm;
  bool wants_late_norm(bool runs_ahead) const {
    return late_norm.value_or(runs_ahead) && (check_finite || gradient_clipping == 0.0);
  }
  bool check_finite = true;  // fp32, bf16: the step is skipped where a gradient is not finite
  // The most steps in a row that may be skipped for that; the next one is an error.
  int max_skipped_steps = 20;
  std::string trace;    // the file of the timeline (step_trace.h); empty: none
  int trace_steps = 3;  // that are in it
};

using plan::UpdateRule;

// The form of the masters that the rule needs. ConfigError for settings that do not fit it. A
// user's optimizer sees fp32 masters; the engine's own work on weights and remainders, or round.
inline plan::Masters masters_for(UpdateRule rule, const EngineOptions& options) {
  if (plan::is_external(rule) && options.rounds_masters)
    throw ConfigError(
        "bf16.bf16_master_weights_and_grads: is for Adam, AdamW and Lion, which round what they "
        "compute "
        "themselves; remove the key, or take one of these; found another optimizer");
  if (plan::is_external(rule)) return plan::Masters::kFloat32;
  return options.rounds_masters ? plan::Masters::kRounded : plan::Masters::kRemainder;
}

// Shares EngineOptions::staging among the budgets of `options` for the memory through which drives
// are staged. Lowers those, not below kLeastStaging, to one and a half times the bytes of a rank on
// drives: that holds all of them, so that nothing is read again. If weights and states both rest on
// drives, leases at once can also hold the states of any unit whole. Otherwise an update would take
// such a unit in parts, and gathers, which take weights whole, would read its weights again each
// time. `shards`: the parts into which a unit is cut (ShardPosition::count).
void cap_staging(EngineOptions& options, std::span<const plan::ParamSpec> params,
                 const plan::ModelPlan& plan, UpdateRule rule, int shards);

}  // namespace strata::engine

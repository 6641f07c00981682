// The settings that the engine's parts read, in their own units. engine_options_from() derives them
// from a Config; tests and programs without a configuration file set them by hand. Immutable value.
// The functions are pure arithmetic on options and plan, the same for the engine and its forecast.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "strata/base/dtype.h"
#include "strata/base/error.h"
#include "strata/base/units.h"
#include "strata/memory/ledger.h"
#include "strata/offload/make_store.h"
#include "strata/plan/unit_plan.h"

namespace strata::engine {

struct EngineOptions {
  std::string name = "engine";  // tells the engines of one process apart; the same on every rank
  // Below 3 the weights of every unit stay whole; at 3 only those of persistent units do.
  int stage = 3;
  // Where gradients are reduced: after every micro-step, or once, at the accumulation boundary,
  // which keeps every unit's whole gradient in between. The first is the same bits at every stage.
  bool reduce_at_boundary = false;
  // Whether weights that stay whole are brought up to date beside the next forward, each unit when
  // it is used; otherwise before the step ends. Absent: beside it where the device runs ahead.
  std::optional<bool> gather_lazily;
  bool sum_gradients = false;                  // over ranks; else the mean
  DType reduce_dtype = DType::kFloat32;        // of flat gradient buffers, on the wire
  DType accumulation_dtype = DType::kFloat32;  // of reduced gradients kept between micro-steps
  // Where reduced gradients rest between their reduction and the update: the device, or the host.
  memory::Tier gradient_tier = memory::Tier::kDevice;
  offload::StatePlacement states;   // what the optimizer keeps, and masters
  offload::StatePlacement weights;  // of units that are sharded (stage 3) and not persistent
  bool offloads_weights() const { return weights.offloads(); }
  // Whether any state rests elsewhere than on the device.
  bool offloads() const {
    return states.offloads() || weights.offloads() || gradient_tier == memory::Tier::kHost;
  }
  // bf16 weights are updated in fp32 and rounded at each step, without any kept master. Then their
  // moments may be bf16, too.
  bool rounds_masters = false;
  DType moment_dtype = DType::kFloat32;
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
  bool allow_unused =
      true;  // false: a trainable parameter without a gradient is an error at the step
  // A parameter for which no rank has a gradient in a step is updated with a gradient of zeroes, so
  // that it decays and its momentum continues. False: it is not updated, and the step does not
  // count for it.
  bool decay_unused = false;
  // Whether the norm of the gradients is computed in place, without a host wait. Absent: where the
  // device runs ahead.
  std::optional<bool> late_norm;
  bool wants_late_norm(bool runs_ahead) const {
    return late_norm.value_or(runs_ahead) && check_finite;
  }
  bool check_finite = true;  // fp32, bf16: the step is skipped where a gradient is not finite
  // The most steps in a row that may be skipped for that; the next one is an error.
  int max_skipped_steps = 20;
  std::string trace;    // the file of the timeline (step_trace.h); empty: none
  int trace_steps = 3;  // that are in it
};

// The rule that updates the shards.
enum class UpdateRule { kNone, kAdam, kAdamW, kExternal };

// The form of the masters that the rule needs. ConfigError for settings that do not fit it. A
// user's optimizer sees fp32 masters; Adam and AdamW work on weights and remainders, or round.
inline plan::Masters masters_for(UpdateRule rule, const EngineOptions& options) {
  if (rule == UpdateRule::kExternal && options.rounds_masters) {
    throw ConfigError(
        "bf16.bf16_master_weights_and_grads: is for Adam and AdamW, which round what they compute "
        "themselves; remove the key, or take one of these; found another optimizer");
  }
  if (rule == UpdateRule::kExternal) return plan::Masters::kFloat32;
  return options.rounds_masters ? plan::Masters::kRounded : plan::Masters::kRemainder;
}

// Lowers the budgets of `options` to the memory through which drives are staged, but not below
// kLeastStaging: the configured budget, or less if less holds all bytes of a rank on drives, so
// that nothing is read again. Less is one and a half times those bytes. If weights and states both
// rest on drives, it is also enough that leases at once hold the states of any unit whole.
// Otherwise an update would take such a unit in parts, and gathers, which take weights whole, would
// read its weights again each time. Units: bytes of one rank, in whole pages. `shards`: the parts
// into which a unit is cut (ShardPosition::count).
void cap_staging(EngineOptions& options, std::span<const plan::ParamSpec> params,
                 const plan::ModelPlan& plan, UpdateRule rule, int shards);

}  // namespace strata::engine

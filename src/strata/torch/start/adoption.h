// Takes the values of a live model's parameters into the engine's shards.
#pragma once

#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/engine/engine.h"
#include "strata/plan/init_plan.h"
#include "strata/torch/model/model_plan.h"
#include "strata/torch/start/original_values.h"

namespace strata::torch {

// The dtype of each parameter's values, if it has some. It must be equal on all ranks, or they
// bring different models. For engine::agree_on_text, before adopt_values().
std::string describe_values(const std::vector<ModelParameter>& parameters);

// Collective. Rank 0's values win: the other ranks read them in rank 0's memory (rank_0_values.h),
// or ranks compare fingerprints of blocks and rank 0 sends the blocks that differ on any rank.
// Values may lie on the host or on the engine's device, `place`, contiguous or not. `tier` is the
// order in which memory is taken and given back (plan/init_plan.h): if the engine's memory does not
// fit beside the values, `originals` are given up as it grows; else all are kept, for the caller to
// release or to put back. Parameters without values are skipped. Parameters that other models have
// sharded come in pieces of `piece` bytes, and those models retire. Returns whether units that stay
// whole have been written whole on every rank.
bool adopt_values(engine::Engine& engine, c10::Device place,
                  const std::vector<ModelParameter>& parameters, plan::InitTier tier,
                  ThreadPool& threads, OriginalValues& originals, Bytes piece);

}  // namespace strata::torch

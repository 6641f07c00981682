// Steps whose states and gradients rest elsewhere than on the device: the bits of the plain loop.
#pragma once

#include "engine/core/training_step_cases.h"
#include "io/temporary_folder.h"

namespace strata::engine::fake {

// Room for parts of a few thousand elements at a time: several parts of the large parameter below.
inline constexpr Bytes kTightStaging = 1_MiB;
inline constexpr std::int64_t kManyElements = 100'000;

// small_builder()'s with a parameter of which a tight store lends parts.
inline plan::ModelBuilder uneven_builder(DType dtype) {
  plan::ModelBuilder builder = small_builder(dtype);
  builder.linear(0, "large", kManyElements, dtype);
  return builder;
}

inline void place_states(EngineOptions& options, memory::Tier tier, const std::string& folder) {
  options.states = {tier, {}, {folder}, kTightStaging, {}, /*verify=*/true};
  options.gradient_tier = memory::Tier::kHost;
}

// By stages 1 to 3, world sizes and dtypes, with accumulation, clipping and a loss scale.
inline void expect_bits_where_states_rest(memory::Tier tier, int stage, Over over) {
  const testing::TemporaryFolder folder;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const FakeModel model(uneven_builder(dtype));
    for (int world = 1; world <= 3; ++world) {
      if (over == Over::kLatePeers && dtype != DType::kBFloat16 && world != 2)
        continue;  // for speed
      Case c{dtype, world, world == 2 ? 3 : 1, {}, dtype == DType::kFloat16 ? 1024.0 : 1.0, over};
      c.options.engine.stage = stage;
      c.options.engine.gradient_clipping = world == 3 ? 0.0 : 0.25;
      c.options.engine.late_norm = over == Over::kLatePeers && dtype == DType::kBFloat16;
      c.options.prepares_first = world > 1;
      place_states(c.options.engine, tier, folder.path());
      expect_bits_of_reference(model, c, plain_script(model));
    }
  }
}

// States on the host, whose parts of a page are dealt to the host's processors and to the device.
inline void expect_bits_whichever_lane_updates(int stage) {
  UpdateLanes lanes;
  lanes.threads = 2;
  lanes.part = Numel(1 << 15);
  std::vector<UpdateLanes> all(4, lanes);
  all[0].which = UpdateWhere::kDevice;
  all[1].which = UpdateWhere::kHost;
  all[2].seed = 5;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const FakeModel model(uneven_builder(dtype));
    for (int world = 1; world <= 3; ++world) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        const bool once = world == 3 || i % 2 == 0;
        Case c{dtype, world, once ? 1 : 4, {}, dtype == DType::kFloat16 ? 1024.0 : 1.0};
        c.over = Over::kLatePeers;
        c.options.engine.stage = stage;
        c.options.engine.lanes = all[i];
        c.options.can_await = i % 2 == 1;
        c.options.engine.gradients_in_16 = once;
        c.options.engine.gradient_clipping = i == 3 ? 0.0 : 0.25;
        c.options.engine.late_norm = dtype != DType::kFloat16;
        c.options.engine.states = {memory::Tier::kHost, {}, {}, kTightStaging, {}};
        c.options.engine.gradient_tier = memory::Tier::kHost;
        if (stage == 3 && i > 0) {
          c.options.engine.weights = c.options.engine.states;
          c.ahead = world > 1;  // peers gather no weights that rest on the host
          if (c.ahead) c.over = Over::kJoint;
        }
        expect_bits_of_reference(model, c, plain_script(model));
      }
    }
  }
}

// From the second step on states of the host, or some of them, are cached on the device; what
// `between` does with them changes no bit.
inline void expect_bits_where_states_are_cached(int stage, bool all,
                                                const std::function<void(FakeRank&)>& between) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const FakeModel model(uneven_builder(dtype));
    for (int world = 1; world <= 3; ++world) {
      Case c{dtype, world, world == 1 ? 1 : 2, {}, 1.0, Over::kLatePeers};
      c.options.engine.stage = stage;
      c.options.engine.lanes.cache = all ? 1_GiB : 256_KiB;
      c.options.engine.lanes.part = Numel(1 << 15);
      c.options.can_await = world == 2;
      c.options.engine.gradients_in_16 = world == 1;
      c.options.engine.gradient_clipping = 0.25;
      c.options.engine.states = {memory::Tier::kHost, {}, {}, kTightStaging, {}};
      c.options.engine.gradient_tier = memory::Tier::kHost;
      if (stage == 3 && dtype == DType::kBFloat16) {
        c.options.engine.weights = c.options.engine.states;
        c.ahead = world > 1;  // peers gather no weights that rest on the host
        if (c.ahead) c.over = Over::kJoint;
      }
      c.between = [&](FakeRank& rank) {
        const std::int64_t steps = rank.engine().optimizer()->steps();
        if (steps < 2 || rank.engine().in_backward()) return;
        between(rank);
      };
      expect_bits_of_reference(model, c, plain_script(model));
    }
  }
}

inline Bytes cached_states(FakeRank& rank) {
  const memory::Ledger& ledger = rank.ledger();
  return ledger.held(memory::Tier::kDevice, memory::Kind::kOptimizerState) +
         ledger.held(memory::Tier::kDevice, memory::Kind::kMasterWeights);
}

}  // namespace strata::engine::fake

// Steps between which all states of the ranks are away from the device for a while.
#pragma once

#include <gmock/gmock.h>

#include "engine/core/training_step_cases.h"
#include "io/temporary_folder.h"

namespace strata::engine::fake {

inline constexpr StateSet kAllStates = {true, true, true, true, true};

// The engine holds nothing on the device, and refuses calls that need it there.
inline void expect_parked(FakeRank& rank) {
  using memory::Kind;
  const memory::Ledger& ledger = rank.ledger();
  for (const Kind kind : {Kind::kWeights, Kind::kGathered, Kind::kGradients, Kind::kGradientShards,
                          Kind::kMasterWeights, Kind::kOptimizerState}) {
    EXPECT_EQ(ledger.held(memory::Tier::kDevice, kind), 0_B) << name_of(kind);
  }
  EXPECT_GT(ledger.held(memory::Tier::kHost, Kind::kWeights), 0_B);
  const auto call_reload = ::testing::HasSubstr("reload_states()");
  Engine& engine = rank.engine();
  const auto refusal = [](const auto& call) { return testing::message_of<UsageError>(call); };
  EXPECT_THAT(refusal([&] { engine.step(groups_of(0), 1.0, false); }), call_reload);
  EXPECT_THAT(refusal([&] { engine.begin_forward(); }), call_reload);
  EXPECT_THAT(refusal([&] { engine.begin_backward(true); }), call_reload);
  EXPECT_THAT(refusal([&] { engine.weights_changed(); }), call_reload);
  for (const Unit& unit : engine.weights().units()) {
    EXPECT_FALSE(rank.views().attached(unit.id));
    EXPECT_FALSE(rank.gatherer().gathered(unit.id));
    EXPECT_THAT(refusal([&] { rank.gatherer().acquire(unit.id); }), call_reload);
  }
}

inline void go_away_and_come_back(FakeRank& rank, bool pinned) {
  const memory::Ledger& ledger = rank.ledger();
  const Bytes on_host = ledger.held(memory::Tier::kHost);
  StateOffload& state_offload = rank.engine().state_offload();
  ASSERT_TRUE(state_offload.offload_states({.moments = true, .gradients = true}, pinned));
  EXPECT_EQ(state_offload.away().text(), "optim_states, lp_grads");
  ASSERT_TRUE(state_offload.offload_states(kAllStates, pinned));
  ASSERT_TRUE(state_offload.offload_states(kAllStates, pinned));
  expect_parked(rank);
  state_offload.reload_states();
  state_offload.reload_states();
  EXPECT_FALSE(state_offload.away().any());
  EXPECT_EQ(ledger.held(memory::Tier::kHost), on_host);
}

inline void expect_bits_with_states_away(int stage, Over over) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const FakeModel model(small_builder(dtype));
    for (const int world : {1, 2, 3}) {
      Case c{dtype, world, 2, {}, 1.0, over};
      c.options.engine.stage = stage;
      c.options.engine.reduce_at_boundary = world == 3;
      c.options.engine.gradient_clipping = 0.25;
      c.options.can_await = over == Over::kLatePeers && world == 2;
      c.between = [&](FakeRank& rank) { go_away_and_come_back(rank, dtype == DType::kFloat32); };
      expect_bits_of_reference(model, c, plain_script(model));
    }
  }
}

}  // namespace strata::engine::fake

// States that leave the device between passes and come back: the bits of training, and the errors
// of calls while they are away.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "device/limited_device.h"
#include "engine/core/offloaded_cases.h"
#include "engine/core/parking_cases.h"
#include "strata/engine/state_offload.h"

namespace strata::engine::fake {
namespace {

class ParkedSteps : public ::testing::TestWithParam<int> {};

TEST_P(ParkedSteps, HaveTheBitsOfThePlainLoop) {
  for (const Over over : {Over::kThreads, Over::kPeers, Over::kPeersGather, Over::kPeersReduce})
    expect_bits_with_states_away(GetParam(), over);
}

INSTANTIATE_TEST_SUITE_P(Stages, ParkedSteps, ::testing::Values(0, 1, 2, 3),
                         [](const auto& stage) { return fmt::format("Stage{}", stage.param); });

// States on the host or a drive stay there; the weights of units that stay whole leave the device.
TEST(StateOffload, LeavesAloneWhatRestsElsewhere) {
  for (const memory::Tier tier : {memory::Tier::kHost, memory::Tier::kNvme}) {
    const testing::TemporaryFolder folder;
    const FakeModel model(uneven_builder(DType::kBFloat16));
    Case c{DType::kBFloat16, 2, 1, {}, 1.0};
    c.options.engine.stage = 2;
    place_states(c.options.engine, tier, folder.path());
    c.between = [](FakeRank& rank) { go_away_and_come_back(rank, true); };
    expect_bits_of_reference(model, c, plain_script(model));
  }
}

// Evaluation goes on while only the states that steps need are away.
TEST(StateOffload, LetsForwardAndBackwardRunWithoutOptimizerStates) {
  const FakeModel model(small_builder(DType::kBFloat16));
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.engine.stage = 3;
    FakeRank rank(model, options, std::move(collectives));
    rank.forward();
    StateOffload& state_offload = rank.engine().state_offload();
    ASSERT_TRUE(state_offload.offload_states({.moments = true, .masters = true}, true));
    add_all(rank, all_gradients(model, 0, 0, r), {}, /*boundary=*/true);
    EXPECT_THAT(
        testing::message_of<UsageError>([&] { rank.engine().step(groups_of(0), 1.0, false); }),
        ::testing::HasSubstr("away are optim_states, hp_params"));
    state_offload.reload_states();
    EXPECT_TRUE(rank.engine().step(groups_of(0), 1.0, false).applied);
  }));
}

TEST(StateOffload, RefusesAUnitInUseAndABackwardPassAndOtherStatesOnOtherRanks) {
  const FakeModel model(small_builder(DType::kFloat32));
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.engine.stage = 3;
    FakeRank rank(model, options, std::move(collectives));
    StateOffload& state_offload = rank.engine().state_offload();
    const auto refusal = [&] { state_offload.offload_states(kAllStates, true); };
    if (r == 1) rank.gatherer().acquire(0);
    EXPECT_THAT(testing::message_of<UsageError>(refusal), ::testing::HasSubstr("rank 1"));
    if (r == 1) rank.gatherer().release(0);
    EXPECT_FALSE(state_offload.away().any());
    rank.forward();
    rank.engine().begin_backward(true);
    EXPECT_THAT(testing::message_of<UsageError>(refusal),
                ::testing::HasSubstr("within a backward pass"));
    rank.engine().abandon_backward();
    EXPECT_THAT(testing::message_of<ConfigError>([&] {
                  state_offload.offload_states({.moments = r == 0, .masters = r == 1}, true);
                }),
                ::testing::HasSubstr("hp_params"));
    state_offload.offload_states(kAllStates, true);
    state_offload.reload_states();
  }));
}

// Other memory fills one rank's device when states are to come back.
TEST(StateOffload, TellsEveryRankOfADeviceWithoutRoomAndComesBackLater) {
  const FakeModel model(small_builder(DType::kBFloat16));
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.device = std::make_shared<device::LimitedDevice>(1_MiB);
    FakeRank rank(model, options, std::move(collectives));
    rank.forward();
    add_all(rank, all_gradients(model, 0, 0, r), {}, /*boundary=*/true);
    ASSERT_TRUE(rank.engine().step(groups_of(0), 1.0, false).applied);
    const std::vector<std::byte> before = rank.weight(0);
    StateOffload& state_offload = rank.engine().state_offload();
    state_offload.offload_states(kAllStates, true);
    std::unique_ptr<device::Memory> others;
    if (r == 0)
      others = options.device->allocate(options.device->free_bytes(), memory::Kind::kStaging);
    EXPECT_THROW(state_offload.reload_states(), OutOfMemoryError);
    EXPECT_TRUE(state_offload.away().any());
    EXPECT_THROW(rank.engine().begin_forward(), UsageError);
    others.reset();
    state_offload.reload_states();
    EXPECT_EQ(rank.weight(0), before);
    rank.forward();
    add_all(rank, all_gradients(model, 1, 0, r), {}, /*boundary=*/true);
    EXPECT_TRUE(rank.engine().step(groups_of(1), 1.0, false).applied);
  }));
}

// Gradients that are dropped while they are away do not come back.
TEST(StateOffload, ForgetsGradientsThatAreDroppedMeanwhile) {
  const FakeModel model(small_builder(DType::kFloat32));
  expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    FakeRank rank(model, options, std::move(collectives));
    rank.forward();
    add_all(rank, all_gradients(model, 0, 0, r), {}, /*boundary=*/false);
    StateOffload& state_offload = rank.engine().state_offload();
    state_offload.offload_states(kAllStates, false);
    rank.engine().zero_gradients();
    EXPECT_EQ(rank.ledger().held(memory::Tier::kHost, memory::Kind::kGradientShards), 0_B);
    state_offload.reload_states();
    EXPECT_EQ(rank.ledger().held(memory::Tier::kDevice, memory::Kind::kGradientShards), 0_B);
    const std::vector<std::byte> before = rank.weight(0);
    rank.engine().step(groups_of(0), 1.0, false);
    EXPECT_EQ(rank.weight(0), before);
  }));
}

}  // namespace
}  // namespace strata::engine::fake

// Updates in the backward pass that ends a step: the bits of updates in step(), and an error for
// what may not come between both.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "engine/core/offloaded_cases.h"
#include "engine/core/short_passes.h"

namespace strata::engine::fake {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

void update_early(EngineOptions& options) {
  options.update_in_backward = true;
  options.check_finite = false;
}

class EarlyUpdate : public ::testing::TestWithParam<int> {};  // stage

TEST_P(EarlyUpdate, HasTheBitsOfUpdatesInTheStep) {
  using memory::Tier;
  const FakeModel narrow(uneven_builder(DType::kBFloat16));
  const FakeModel wide(uneven_builder(DType::kFloat32));
  struct Job {
    const FakeModel& model;
    int world;
    Tier tier;
  };
  for (const auto& [model, world, tier] :
       {Job{wide, 1, Tier::kHost}, Job{narrow, 1, Tier::kDevice}, Job{wide, 2, Tier::kDevice},
        Job{narrow, 2, Tier::kHost}, Job{narrow, 3, Tier::kHost}}) {
    const DType dtype = &model == &wide ? DType::kFloat32 : DType::kBFloat16;
    Case c{dtype, world, world == 2 ? 4 : 1, {}, 1.0, Over::kLatePeers};
    update_early(c.options.engine);
    c.options.engine.stage = GetParam();
    c.options.engine.states.tier = c.options.engine.gradient_tier = tier;
    c.options.engine.gradients_in_16 = c.accumulation == 1;
    c.options.engine.lanes.threads = 2;
    c.options.engine.lanes.part = Numel(1 << 15);
    if (tier == Tier::kHost) c.options.engine.lanes.seed = 7;
    if (world == 1 && GetParam() == 3) c.options.engine.weights.tier = tier;
    expect_bits_of_reference(model, c, plain_script(model));
  }
}

TEST_P(EarlyUpdate, MeetsTheStateCache) {
  const FakeModel model(uneven_builder(DType::kBFloat16));
  Case c{DType::kBFloat16, 1, 1, {}, 1.0, Over::kLatePeers};
  update_early(c.options.engine);
  c.options.engine.stage = GetParam();
  c.options.engine.states.tier = c.options.engine.gradient_tier = memory::Tier::kHost;
  c.options.engine.lanes.cache = 1_GiB;
  bool cached = false;
  c.between = [&](FakeRank& rank) {
    cached = cached || rank.engine().optimizer()->cached() > Bytes();
  };
  expect_bits_of_reference(model, c, plain_script(model));
  EXPECT_TRUE(cached);
}

// Some parameters have no gradient on any rank, or on one of them: their units wait for step().
TEST_P(EarlyUpdate, WaitsForUnitsWithoutAGradient) {
  const FakeModel model(small_builder(DType::kFloat32));
  Script script = plain_script(model);
  script.gradients = [&](int step, int micro, int rank) {
    Gradients gradients = all_gradients(model, step, micro, rank);
    for (int p = 0; p < model.count(); ++p) {
      if (p % 5 == step || (p % 5 == 3 && rank == 0))
        gradients[static_cast<std::size_t>(p)].reset();
    }
    return gradients;
  };
  for (const int world : {1, 2}) {
    Case c{DType::kFloat32, world, 1, {}, 1.0, Over::kLatePeers};
    update_early(c.options.engine);
    c.options.engine.stage = GetParam();
    expect_bits_of_reference(model, c, script);
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, EarlyUpdate, ::testing::Values(1, 2, 3));

// `body` gets ranks after a backward pass that ends a step and has updated weights.
void with_early_updates(int world, const std::function<void(FakeRank&)>& body,
                        std::vector<std::string>* errors = nullptr) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  const auto found = run_ranks(world, [&](int, std::shared_ptr<comm::Collectives> ranks) {
    RankOptions options;
    update_early(options.engine);
    FakeRank rank(model, options, std::move(ranks));
    rank.groups = std::vector<GroupScalars>(1);
    train_one_pass(rank);
    EXPECT_EQ(rank.engine().optimizer()->steps(), 1);  // the step's updates have begun
    body(rank);
  });
  if (errors != nullptr)
    *errors = found;
  else
    expect_no_errors(found);
}

TEST(EarlyUpdates, RefuseAnotherPassAndZeroGradAndReadsUntilTheStep) {
  with_early_updates(2, [](FakeRank& rank) {
    const auto refused = AllOf(HasSubstr("strata.update_at"), HasSubstr("step()"));
    EXPECT_THAT(message_of<UsageError>([&] { rank.begin_backward(true); }), refused);
    EXPECT_THAT(message_of<UsageError>([&] { rank.engine().zero_gradients(); }), refused);
    EXPECT_THAT(message_of<UsageError>([&] { rank.gatherer().acquire(0); }), refused);
    EXPECT_THAT(message_of<UsageError>([&] { rank.engine().require_intact_weights(); }), refused);
    step(rank);
    train_one_pass(rank);
    step(rank);
    rank.engine().finish_step();
    EXPECT_EQ(rank.engine().optimizer()->steps(), 2);
  });
}

TEST(EarlyUpdates, RefuseOtherRatesInTheStep) {
  std::vector<std::string> errors;
  with_early_updates(
      2,
      [](FakeRank& rank) {
        rank.engine().end_micro_step();
        std::vector<GroupScalars> groups(1);
        groups[0].lr = 0.5;
        try {
          rank.engine().step(groups, 1.0, false);
        } catch (const Error&) {
          EXPECT_THAT(message_of<UsageError>([&] { rank.engine().begin_forward(); }),
                      HasSubstr("failed half-way"));
          throw;
        }
      },
      &errors);
  EXPECT_THAT(errors, ::testing::Each(HasSubstr("has changed between backward() and step()")));
}

TEST(EarlyUpdates, RefuseALateGradientAndTrainAfterALoad) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  expect_no_errors(run_ranks(1, [&](int, std::shared_ptr<comm::Collectives> ranks) {
    RankOptions options;
    update_early(options.engine);
    FakeRank rank(model, options, std::move(ranks));
    rank.groups = std::vector<GroupScalars>(1);
    rank.forward();
    rank.begin_backward(true);
    for (int p = model.count(); p-- > 0;) rank.add(p, noises(1, model.numel(p)));
    EXPECT_THAT(message_of<UsageError>([&] {
                  rank.add(model.count() - 1, noises(1, model.numel(model.count() - 1)));
                }),
                HasSubstr("strata.update_at"));
    rank.engine().abandon_backward();
    EXPECT_THAT(message_of<UsageError>([&] { rank.engine().begin_forward(); }),
                AllOf(HasSubstr("failed half-way"), HasSubstr("strata.update_at")));
    load_initial_weights(rank);
    train_one_pass(rank);
    step(rank);
  }));
}

}  // namespace
}  // namespace strata::engine::fake

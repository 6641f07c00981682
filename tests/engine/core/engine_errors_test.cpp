// Errors that a user or a dying peer can cause in the engine: each has its message, on every rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "engine/core/fake_model.h"
#include "strata/comm/peer/peer_collectives.h"

namespace strata::engine::fake {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

const std::vector<GroupScalars> kGroups(3);

Values gradient_of(const FakeRank& rank, int param) {
  return noises(static_cast<std::uint64_t>(param), rank.model().numel(param));
}

void train(FakeRank& rank) {
  rank.forward();
  rank.backward(true, [&](int p) { rank.add(p, gradient_of(rank, p)); });
}

std::vector<std::string> on_ranks(
    int world, const std::function<void(int, std::shared_ptr<comm::Collectives>)>& body) {
  return run_ranks(world, body);
}

// The message of the Error of this class that `call` throws.
template <typename Class, typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Class& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(EngineErrors, BackwardNeedsAForwardPass) {
  const FakeModel model(small_builder(DType::kFloat32));
  expect_no_errors(on_ranks(2, [&](int, auto collectives) {
    FakeRank rank(model, {}, std::move(collectives));
    const auto backward = [&] { rank.engine().begin_backward(true); };
    EXPECT_THAT(message_of<UsageError>(backward),
                HasSubstr("backward() was called without a forward pass"));
    rank.forward();
    rank.engine().begin_backward(true);
    EXPECT_THAT(message_of<UsageError>(backward), HasSubstr("while a backward pass is running"));
    rank.engine().end_backward();
  }));
}

TEST(EngineErrors, StepNeedsABackwardPassAndAnOptimizer) {
  const FakeModel model(small_builder(DType::kFloat32));
  expect_no_errors(on_ranks(2, [&](int, auto collectives) {
    FakeRank rank(model, {}, std::move(collectives));
    const auto step = [&] { rank.engine().step(kGroups, 1.0, false); };
    EXPECT_THAT(message_of<UsageError>(step),
                HasSubstr("without a backward pass since the last step"));
    train(rank);
    step();
    EXPECT_THAT(message_of<UsageError>(step), HasSubstr("without a backward pass"));
  }));
  expect_no_errors(on_ranks(1, [&](int, auto collectives) {
    RankOptions options;
    options.rule = UpdateRule::kNone;
    FakeRank rank(model, options, std::move(collectives));
    train(rank);
    EXPECT_THAT(message_of<UsageError>([&] { rank.engine().step(kGroups, 1.0, false); }),
                HasSubstr("on an engine without an optimizer"));
  }));
}

TEST(EngineErrors, AFrozenParameterTakesNoGradient) {
  const FakeModel model(small_builder(DType::kFloat32));
  expect_no_errors(on_ranks(1, [&](int, auto collectives) {
    FakeRank rank(model, {}, std::move(collectives));
    const int frozen = 6;
    ASSERT_FALSE(model.params[frozen].trainable);
    rank.forward();
    rank.engine().begin_backward(true);
    EXPECT_THAT(message_of<UsageError>([&] { rank.add(frozen, gradient_of(rank, frozen)); }),
                HasSubstr("parameter 'layers.0.frozen' got a gradient, but the engine does not "
                          "train it"));
    rank.engine().abandon_backward();
  }));
}

TEST(EngineErrors, ValuesOutsideAParameterAreRefused) {
  const FakeModel model(small_builder(DType::kFloat32));
  expect_no_errors(on_ranks(1, [&](int, auto collectives) {
    FakeRank rank(model, {}, std::move(collectives));
    const float value = 0.0F;
    const auto* bytes = reinterpret_cast<const std::byte*>(&value);
    EXPECT_THAT(message_of<UsageError>([&] {
                  rank.engine().weights().store(0, Numel(300), Numel(1), bytes, DType::kFloat32);
                }),
                HasSubstr("[300, 301) do not lie in parameter 'embed.weight' of 300 elements"));
  }));
}

TEST(EngineErrors, RanksWithDifferentModelsAreToldTheFirstDifferenceOnEveryRank) {
  const FakeModel model(small_builder(DType::kFloat32));
  plan::ModelBuilder other = small_builder(DType::kFloat32);
  other.params[3].shape = {2};
  const FakeModel different(other);
  const auto errors = on_ranks(3, [&](int r, auto collectives) {
    const FakeRank rank(r == 2 ? different : model, {}, std::move(collectives));
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("different models"),
                                 HasSubstr("rank 0 has 'parameter layers.0.inner.w1: shape [1]"),
                                 HasSubstr("rank 2 has 'parameter layers.0.inner.w1: shape [2]"),
                                 HasSubstr("Ranks that differ from rank 0: 2"))));
}

TEST(EngineErrors, RanksWithMoreParametersOrOtherSettingsAreToldSo) {
  const FakeModel model(small_builder(DType::kFloat32));
  plan::ModelBuilder other = small_builder(DType::kFloat32);
  other.linear(0, "extra", 3);
  const FakeModel larger(other);
  EXPECT_THAT(on_ranks(2,
                       [&](int r, auto collectives) {
                         const FakeRank rank(r == 1 ? larger : model, {}, std::move(collectives));
                       }),
              Each(AllOf(HasSubstr("rank 0 has nothing (its list ends)"),
                         HasSubstr("'parameter extra.weight"))));
  EXPECT_THAT(on_ranks(2,
                       [&](int r, auto collectives) {
                         RankOptions options;
                         options.settings =
                             r == 0 ? "a = 1\nzero.stage = 3" : "a = 1\nzero.stage = 2";
                         const FakeRank rank(model, options, std::move(collectives));
                       }),
              Each(AllOf(HasSubstr("different configurations"), HasSubstr("'zero.stage = 3'"),
                         HasSubstr("rank 1 has 'zero.stage = 2'"))));
}

TEST(EngineErrors, GradientsThatAreNotFiniteLeaveTheWeightsAndNameTheUnitAndTheRank) {
  const FakeModel model(small_builder(DType::kBFloat16));
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    expect_no_errors(on_ranks(3, [&](int r, auto collectives) {
      RankOptions options;
      options.engine.max_skipped_steps = 0;
      FakeRank rank(model, options, std::move(collectives));
      std::vector<std::vector<std::byte>> before;
      for (int p = 0; p < model.count(); ++p) before.push_back(rank.weight(p));
      rank.forward();
      rank.backward(true, [&](int p) {
        Values gradient = gradient_of(rank, p);
        if (r == 1 && p == 5) gradient.back() = bad;  // the last element of layers.0
        rank.add(p, gradient);
      });
      EXPECT_THAT(message_of<NumericsError>([&] { rank.engine().step(kGroups, 1.0, false); }),
                  AllOf(HasSubstr("not finite"),
                        HasSubstr("unit 'layers.0:bfloat16' in the shard of rank 2")));
      for (int p = 0; p < model.count(); ++p) {
        EXPECT_EQ(rank.weight(p), before[static_cast<std::size_t>(p)]);
      }
      train(rank);  // training goes on
      EXPECT_TRUE(rank.engine().step(kGroups, 1.0, false).applied);
    }));
  }
}

TEST(EngineErrors, WhereNobodyWaitsForTheNormTheNextStepTellsOfGradientsThatAreNotFinite) {
  const FakeModel model(small_builder(DType::kBFloat16));
  expect_no_errors(on_ranks(3, [&](int r, auto collectives) {
    RankOptions options;
    options.engine.late_norm = true;
    options.engine.max_skipped_steps = 0;
    options.engine.gradient_clipping = 1.0;
    FakeRank rank(
        model, options,
        comm::make_peer_collectives(std::make_shared<device::CpuDevice>(), std::move(collectives)));
    std::vector<std::vector<std::byte>> before;
    for (int p = 0; p < model.count(); ++p) before.push_back(rank.weight(p));
    rank.forward();
    rank.backward(true, [&](int p) {
      Values gradient = gradient_of(rank, p);
      if (r == 1 && p == 5) gradient.back() = std::numeric_limits<float>::infinity();
      rank.add(p, gradient);
    });
    EXPECT_FALSE(rank.engine().step(kGroups, 1.0, false).grad_norm.has_value());
    EXPECT_TRUE(std::isinf(rank.engine().gradient_check().last_norm()));
    for (int p = 0; p < model.count(); ++p)
      EXPECT_EQ(rank.weight(p), before[static_cast<std::size_t>(p)]);
    train(rank);
    EXPECT_THAT(message_of<NumericsError>([&] { rank.engine().step(kGroups, 1.0, false); }),
                AllOf(HasSubstr("the last step"),
                      HasSubstr("unit 'layers.0:bfloat16' in the shard of rank 2")));
    EXPECT_EQ(rank.engine().optimizer()->steps(), 0);
    rank.engine().finish_step();  // it is said once
    train(rank);
    EXPECT_TRUE(rank.engine().step(kGroups, 1.0, false).applied);
    EXPECT_TRUE(std::isfinite(rank.engine().gradient_check().last_norm()));
    EXPECT_NE(rank.weight(0), before[0]);
    EXPECT_EQ(rank.engine().optimizer()->steps(), 1);
  }));
}

TEST(EngineErrors, AnOverflowOfHalfPrecisionSkipsTheStepOnEveryRank) {
  const FakeModel model(small_builder(DType::kFloat16));
  expect_no_errors(on_ranks(2, [&](int r, auto collectives) {
    FakeRank rank(model, {}, std::move(collectives));
    const auto before = rank.weight(0);
    rank.forward();
    rank.backward(true, [&](int p) {
      Values gradient = gradient_of(rank, p);
      if (r == 0 && p == 0) gradient[0] = 1e6F;  // infinite as fp16
      rank.add(p, gradient);
    });
    const StepResult result = rank.engine().step(kGroups, 65536.0, true);
    EXPECT_FALSE(result.applied);
    EXPECT_TRUE(std::isinf(*result.grad_norm));
    EXPECT_EQ(rank.weight(0), before);
    EXPECT_EQ(rank.engine().optimizer()->steps(), 0);
    train(rank);
    EXPECT_TRUE(rank.engine().step(kGroups, 65536.0, true).applied);
    EXPECT_NE(rank.weight(0), before);
  }));
}

TEST(EngineErrors, AnAbandonedBackwardLeavesNothingBehind) {
  const FakeModel model(small_builder(DType::kFloat32));
  std::vector<std::byte> wanted;  // of the run without a failure
  for (const bool fail : {false, true}) {
    expect_no_errors(on_ranks(2, [&](int r, auto collectives) {
      FakeRank rank(model, {}, std::move(collectives));
      if (fail) {
        rank.forward();
        rank.engine().begin_backward(true);
        for (int p = model.count(); p-- > 4;) {
          if (model.params[static_cast<std::size_t>(p)].trainable)
            rank.add(p, gradient_of(rank, p));
        }
        rank.engine().abandon_backward();
      }
      train(rank);
      rank.engine().step(kGroups, 1.0, false);
      const auto weight = rank.weight(0);
      if (!fail && r == 0) wanted = weight;
      if (fail) {
        EXPECT_EQ(weight, wanted);
      }
    }));
  }
}

TEST(EngineErrors, APeerThatAbortsIsNamedAndTheEngineCanBeDestroyed) {
  const FakeModel model(small_builder(DType::kFloat32));
  using Part = std::function<void(FakeRank&)>;
  const Part nothing = [](FakeRank&) {};
  const Part forward_then_backward = [](FakeRank& rank) { train(rank); };
  const Part step = [](FakeRank& rank) { rank.engine().step(kGroups, 1.0, false); };
  const std::pair<Part, Part> cases[] = {
      {nothing, forward_then_backward},
      {[](FakeRank& rank) { rank.forward(); },
       [](FakeRank& rank) {
         rank.backward(true, [&](int p) { rank.add(p, gradient_of(rank, p)); });
       }},
      {forward_then_backward, step}};
  for (const auto& [before, then] : cases) {
    const auto errors = on_ranks(3, [&, before = before, then = then](int r, auto collectives) {
      RankOptions options;
      options.engine.max_reducing = 1_B;
      FakeRank rank(model, options, std::move(collectives));
      before(rank);
      if (r == 1) {
        rank.collectives().abort("its disk is full");
        throw Error("stopped");
      }
      try {
        then(rank);
      } catch (const CommError&) {
        // A front end does this; then the engine ends, with units pinned or half gathered.
        if (rank.engine().in_backward()) rank.engine().abandon_backward();
        throw;
      }
    });
    EXPECT_EQ(errors[1], "stopped");
    for (const std::size_t r : {0U, 2U}) {
      EXPECT_THAT(errors[r], AllOf(HasSubstr("rank 1"), HasSubstr("its disk is full")));
    }
  }
}

TEST(EngineErrors, APeerThatEndsInTheMiddleOfAPassIsNamed) {
  const FakeModel model(small_builder(DType::kFloat32));
  const auto errors = on_ranks(3, [&](int r, auto collectives) {
    FakeRank rank(model, {}, std::move(collectives));
    train(rank);
    if (r == 2) throw Error("stopped");
    rank.engine().step(kGroups, 1.0, false);
  });
  EXPECT_EQ(errors[2], "stopped");
  for (const std::size_t r : {0U, 1U}) EXPECT_THAT(errors[r], HasSubstr("rank 2"));
}

}  // namespace
}  // namespace strata::engine::fake

// Failures within a step's update, and within an abandoned backward pass: the ranks concerned get
// the error once, and the engine does not train on weights of two steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "engine/core/faulty_device.h"
#include "engine/core/short_passes.h"
#include "engine/core/training_step_cases.h"
#include "strata/engine/optimize/external_optimizer.h"

namespace strata::engine::fake {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::vector<GroupScalars> kGroups(1);

template <typename Class, typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Class& error) {
    return error.what();
  }
  return "nothing was thrown";
}

// After a failed update: nothing trains, until weights are loaded.
void expect_broken_until_a_load(FakeRank& rank, const std::string& cause) {
  const auto refused =
      AllOf(HasSubstr("failed half-way"), HasSubstr("load the weights again"), HasSubstr(cause));
  Engine& engine = rank.engine();
  EXPECT_THAT(message_of<UsageError>([&] { engine.begin_forward(); }), refused);
  EXPECT_THAT(message_of<UsageError>([&] { engine.begin_backward(true); }), refused);
  EXPECT_THAT(message_of<UsageError>([&] { engine.end_micro_step(); }), refused);
  EXPECT_THAT(message_of<UsageError>([&] { engine.step(kGroups, 1.0, false); }), refused);
  EXPECT_THAT(message_of<UsageError>([&] { engine.require_intact_weights(); }), refused);
  load_initial_weights(rank);
  for (int p = 0; p < rank.model().count(); ++p)
    EXPECT_EQ(rank.weight(p), rounded(rank.model().initial(p), DType::kFloat32));
  train_one_pass(rank);
  EXPECT_TRUE(engine.step(kGroups, 1.0, false).applied);
}

TEST(UpdateFailure, OfOneRanksOptimizerIsEveryRanksAndALoadMendsIt) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  for (const int stage : {2, 3}) {
    expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
      RankOptions options;
      options.rule = UpdateRule::kExternal;
      options.engine.stage = stage;
      FakeRank rank(model, options, std::move(collectives));
      bool fails = r == 1;
      auto& optimizer = dynamic_cast<ExternalOptimizer&>(*rank.engine().optimizer());
      optimizer.set_update([&](auto) {
        if (std::exchange(fails, false)) throw std::runtime_error("out of patience");
      });
      train_one_pass(rank);
      const auto step = [&] { rank.engine().step(kGroups, 1.0, false); };
      if (r == 1) {
        EXPECT_EQ(message_of<std::runtime_error>(step), "out of patience");
      } else {
        EXPECT_EQ(message_of<Error>(step),
                  "updating the weights failed on rank 1: out of patience");
      }
      expect_broken_until_a_load(rank, "out of patience");
    }));
  }
}

// The update gathers the units that are needed first while it updates others: ranks reach sync
// points in between.
TEST(UpdateFailure, BetweenTheMeetingsOfAnUpdateLosesNobody) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  for (const int stage : {2, 3}) {
    for (const int successes : {0, 4}) {
      expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
        const auto device = std::make_shared<FaultyDevice>();
        RankOptions options;
        options.engine.stage = stage;
        options.device = device;
        FakeRank rank(model, options, joined(std::move(collectives), Over::kLatePeers, device));
        for (int i = 0; i < 2; ++i) {
          train_one_pass(rank);
          step(rank);
        }
        train_one_pass(rank);
        if (r == 1) device->adam_steps.arm(successes);
        EXPECT_THAT(message_of<DeviceError>([&] { step(rank); }),
                    HasSubstr("injected: the kernel was not launched"));
        expect_broken_until_a_load(rank, "injected: the kernel was not launched");
      }));
    }
  }
}

// step() has returned then. The next call of that rank throws, and those of the others.
TEST(UpdateFailure, OfTheHostsProcessorsIsThrownByTheNextCallOfEveryRank) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  const std::string cause = "injected: the host cannot update";
  for (const int world : {1, 2}) {
    const auto errors = run_ranks(world, [&](int r, std::shared_ptr<comm::Collectives> ranks) {
      const auto device = std::make_shared<FaultyDevice>();
      RankOptions options;
      options.device = device;
      options.engine.lanes.which = UpdateWhere::kHost;
      options.engine.states.tier = options.engine.weights.tier = memory::Tier::kHost;
      options.engine.gradient_tier = memory::Tier::kHost;
      FakeRank rank(model, options, joined(std::move(ranks), Over::kJoint, device));
      for (int i = 0; i < 2; ++i) {
        if (i == 1 && r == world - 1) device->adam_steps.arm(1);
        train_one_pass(rank);
        step(rank);
      }
      if (world == 1) {
        EXPECT_THAT(message_of<DeviceError>([&] { rank.engine().finish_step(); }), cause);
        return expect_broken_until_a_load(rank, cause);
      }
      try {
        train_one_pass(rank);
        step(rank);
      } catch (const Error&) {
        if (r == 1) {
          EXPECT_THAT(message_of<UsageError>([&] { rank.engine().begin_forward(); }),
                      HasSubstr("failed half-way"));
        }
        throw;
      }
    });
    for (const std::string& error : errors) EXPECT_THAT(error, HasSubstr(world == 1 ? "" : cause));
  }
}

// A device that fails while a failed pass is dropped must not end the process, nor hide the cause.
TEST(AbandonedBackward, RemembersWhatFailedAndTellsAtTheNextCall) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  std::vector<std::vector<std::byte>> wanted;  // of the run without a failure
  for (const bool fails : {false, true}) {
    expect_no_errors(run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
      const auto device = std::make_shared<FaultyDevice>();
      RankOptions options;
      options.device = device;
      FakeRank rank(model, options, std::move(collectives));
      if (fails) {
        rank.forward();
        rank.engine().begin_backward(true);
        for (const int p : {8, 7}) rank.add(p, noises(5, model.numel(p)));
        device->records.arm();
        rank.engine().abandon_backward();
        EXPECT_THAT(message_of<DeviceError>([&] { rank.engine().begin_forward(); }),
                    HasSubstr("injected: no event can be recorded"));
      }
      train_one_pass(rank);
      step(rank);
      for (int p = 0; p < model.count(); ++p) {
        const auto weight = rank.weight(p);
        if (!fails && r == 0) wanted.push_back(weight);
        if (fails) {
          EXPECT_EQ(weight, wanted[static_cast<std::size_t>(p)]) << "parameter " << p;
        }
      }
    }));
  }
}

}  // namespace
}  // namespace strata::engine::fake

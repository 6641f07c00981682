// The lane in which a rank's processors update, while it is slow, fails, or loses its device: the
// bits of the plain loop, or an error on every rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <tuple>

#include "engine/core/lane_devices.h"
#include "engine/core/short_passes.h"
#include "engine/core/training_step_cases.h"
#include "io/temporary_folder.h"
#include "strata/engine/checkpoint/shard_states.h"

namespace strata::engine::fake {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

constexpr const char* kCause = "injected: the host cannot update";

// The host updates all. Weights rest in the tier `weights`, all else on the host.
RankOptions host_lane(std::shared_ptr<device::CpuDevice> device, memory::Tier weights) {
  RankOptions options;
  options.device = std::move(device);
  options.engine.lanes.which = UpdateWhere::kHost;
  options.engine.states.tier = options.engine.gradient_tier = memory::Tier::kHost;
  options.engine.weights.tier = weights;
  return options;
}

void expect_refused(FakeRank& rank, const std::string& cause) {
  EXPECT_THAT(message_of<UsageError>([&] { rank.engine().begin_forward(); }),
              AllOf(HasSubstr("failed half-way"), HasSubstr(cause)));
}

// Loads weights after a step that counted but changed no state, and trains.
void expect_updates_after_load(FakeRank& rank) {
  const FakeModel& model = rank.model();
  ReferenceStep reference(model, 1, {});
  std::vector<GroupScalars> groups(1);
  const auto step_of_all = [&](const std::function<Values(Numel)>& gradient) {
    Gradients gradients;
    for (int p = 0; p < model.count(); ++p) gradients.emplace_back(gradient(model.numel(p)));
    reference.add({gradients}, true);
    reference.step(groups, 1.0);
  };
  groups[0].lr = 0.0;
  step_of_all([](Numel numel) { return Values(numel.size()); });
  groups[0].lr = GroupScalars().lr;
  load_initial_weights(rank);
  expect_same_weights(rank, reference);
  for (int i = 0; i < 2; ++i) {
    train_one_pass(rank);
    step(rank);
    step_of_all([](Numel numel) { return noises(1, numel); });
    expect_same_weights(rank, reference);
  }
}

// A rank that waits for its lane looks for a lost device now and then. Here it looks before a job
// fails, and after it, while a later job waits for its weights: the device is not lost.
TEST(HostLane, UpdatesAgainAfterASlowJobHasFailedAndWeightsWereLoaded) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  for (const memory::Tier weights : {memory::Tier::kDevice, memory::Tier::kHost}) {
    expect_no_errors(run_ranks(1, [&](int r, std::shared_ptr<comm::Collectives> ranks) {
      Gate job;
      Gate count;
      int jobs = 0;
      int counts = 0;
      int looks = 0;
      const auto device = std::make_shared<LaneDevice>(r);
      FakeRank rank(model, host_lane(device, weights),
                    joined(std::move(ranks), Over::kLatePeers, device));
      train_one_pass(rank);
      job.close();
      count.close();
      device->at_job = [&] {
        job.pass();
        throw DeviceError("{}", kCause);
      };
      device->at_count = [&](device::Stream& stream) {  // the step's, then one for each job
        if (++counts == 3) device->enqueue(stream, [&] { count.pass(); });
      };
      step(rank);
      device->at_event = [&] {
        ++looks;
        if (looks == 1) job.open();
        if (looks == 3) count.open();
      };
      EXPECT_EQ(message_of<DeviceError>([&] { rank.engine().finish_step(); }), kCause);
      count.open();
      device->at_event = nullptr;
      device->at_count = nullptr;
      device->at_job = [&] { ++jobs; };
      expect_refused(rank, kCause);
      expect_updates_after_load(rank);
      EXPECT_EQ(jobs, 2 * model.count());
    }));
  }
}

TEST(HostLane, FailsOnEveryRankAfterASlowJob) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  const auto errors = run_ranks(2, [&](int r, std::shared_ptr<comm::Collectives> ranks) {
    Gate job;
    const auto device = std::make_shared<LaneDevice>(r);
    FakeRank rank(model, host_lane(device, memory::Tier::kDevice),
                  joined(std::move(ranks), Over::kLatePeers, device));
    train_one_pass(rank);
    step(rank);  // peers wait for the device when they reach each other's weights first
    train_one_pass(rank);
    rank.engine().finish_step();
    if (r == 1) {
      job.close();
      device->at_job = [&] {
        job.pass();
        throw DeviceError("{}", kCause);
      };
    }
    step(rank);
    device->at_event = [&] { job.open(); };
    try {
      rank.engine().finish_step();
      train_one_pass(rank);
      step(rank);
    } catch (const Error&) {
      if (r == 1) expect_refused(rank, kCause);
      throw;
    }
  });
  EXPECT_EQ(errors[1], kCause);
  EXPECT_THAT(errors[0], HasSubstr(kCause));
}

// The error is thrown while later jobs of the step wait for their weights.
TEST(HostLane, DoesNoLaterJobOfAStepThatHasFailed) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  expect_no_errors(run_ranks(1, [&](int r, std::shared_ptr<comm::Collectives> ranks) {
    Gate count;
    int jobs = 0;
    int counts = 0;
    const auto device = std::make_shared<LaneDevice>(r);
    FakeRank rank(model, host_lane(device, memory::Tier::kDevice),
                  joined(std::move(ranks), Over::kLatePeers, device));
    train_one_pass(rank);
    count.close();
    device->at_job = [&] {
      if (++jobs == 1) throw DeviceError("{}", kCause);
    };
    device->at_count = [&](device::Stream& stream) {
      if (++counts == 3) device->enqueue(stream, [&] { count.pass(); });
    };
    step(rank);
    std::string error;
    while (error.empty()) {
      try {
        rank.engine().begin_forward();
        std::this_thread::yield();
      } catch (const DeviceError& thrown) {
        error = thrown.what();
      }
    }
    EXPECT_EQ(error, kCause);
    device->at_count = nullptr;
    count.open();
    expect_refused(rank, kCause);
    expect_updates_after_load(rank);
    EXPECT_EQ(jobs, 1 + 2 * model.count());
  }));
}

// Parameters: the tier of weights, and how many counts for the lane arrive in a step.
class LostDevice : public ::testing::TestWithParam<std::tuple<memory::Tier, int>> {
 protected:
  // `body` gets ranks before a step. The last one loses its device: its lane waits for a count for
  // ever. The device's calls fail `within` the step, or when the body says so.
  static std::vector<std::string> run(int world, bool within,
                                      const std::function<void(FakeRank&, StoppingDevice*)>& body) {
    const FakeModel model = model_of_blocks(kBlock, kBlock);
    return run_ranks(world, [&](int r, std::shared_ptr<comm::Collectives> ranks) {
      const auto device = std::make_shared<StoppingDevice>();
      FakeRank rank(model, host_lane(device, std::get<0>(GetParam())),
                    joined(std::move(ranks), Over::kJoint, device));
      train_one_pass(rank);
      step(rank);
      train_one_pass(rank);
      rank.engine().finish_step();
      const bool loses = r == world - 1;
      if (loses) device->stop_after(std::get<1>(GetParam()), within);
      body(rank, loses ? device.get() : nullptr);
    });
  }
  static void expect_lost(const std::vector<std::string>& errors) {
    for (const std::string& error : errors) EXPECT_THAT(error, HasSubstr("the device is lost"));
  }
};

TEST_P(LostDevice, IsAnErrorOfTheNextCallOnEveryRank) {
  for (const int world : {1, 2}) {
    expect_lost(run(world, /*within=*/false, [](FakeRank& rank, StoppingDevice* lost) {
      step(rank);
      if (lost != nullptr) lost->lose(true);
      try {
        rank.engine().finish_step();
        train_one_pass(rank);
        step(rank);
      } catch (const Error&) {
        if (lost != nullptr) expect_refused(rank, "the device is lost");
        throw;
      }
    }));
  }
}

TEST_P(LostDevice, IsAnErrorOnEveryRankWithinAStep) {
  for (const int world : {1, 2}) {
    expect_lost(run(world, /*within=*/true, [](FakeRank& rank, StoppingDevice*) {
      try {
        step(rank);
      } catch (const Error&) {
        expect_refused(rank, "the device is lost");
        throw;
      }
    }));
  }
}

TEST_P(LostDevice, LetsTheEngineEnd) {
  const auto errors = run(1, /*within=*/false, [](FakeRank& rank, StoppingDevice* lost) {
    step(rank);
    lost->lose(true);
    throw std::runtime_error("the script ends");
  });
  EXPECT_THAT(errors, ::testing::Each("the script ends"));
}

INSTANTIATE_TEST_SUITE_P(Points, LostDevice,
                         ::testing::Values(std::tuple(memory::Tier::kDevice, 0),
                                           std::tuple(memory::Tier::kDevice, 1),
                                           std::tuple(memory::Tier::kDevice, 4),
                                           std::tuple(memory::Tier::kHost, 0)));

using States = std::vector<std::vector<std::byte>>;

// Reads the states of the rank's shards, as callers do that save them.
States states_of(FakeRank& rank) {
  rank.engine().finish_step();
  ShardStates states(rank.engine());
  States all;
  for (const Unit& unit : rank.engine().weights().units()) {
    for (const auto& piece : unit.layout.pieces(rank.collectives().shard_position().index)) {
      for (const std::string_view kind : states.kinds_of(unit.id)) {
        const Numel numel = piece.param_end - piece.param_begin;
        const Numel first = format::numel_of(kind, piece.shard_offset);
        const Numel count = format::numel_of(kind, numel);
        all.emplace_back(bytes_of(count, states.dtype_of(unit.id, kind)).size());
        states.enqueue_read(unit.id, kind, first, count, all.back());
        states.settle();
      }
    }
  }
  return all;
}

// Steps of which the second one overflows. From the second one on no job runs before the next
// forward has begun, or before a caller waits that reads states. In the first one peers wait for
// the device, when they reach each other's weights.
struct SlowCase {
  DType dtype = DType::kFloat32;
  int world = 1;
  int accumulation = 1;
  RankOptions options;
  bool looks = false;  // a caller waits so long that it looks for a lost device

  // Returns the states that a rank has read.
  std::vector<States> train(const FakeModel& model, int r,
                            std::shared_ptr<comm::Collectives> ranks) const {
    constexpr int kOverflows = 1;
    const double loss_scale = dtype == DType::kFloat16 ? 1024.0 : 1.0;
    Gate gate;
    const auto device = std::make_shared<LaneDevice>(r);
    int jobs = 0;
    device->at_job = [&] {
      gate.pass();
      ++jobs;
    };
    RankOptions of_rank = options;
    of_rank.device = device;
    of_rank.runs = [&](const plan::ScopeSpec&) {
      gate.open();
      return true;
    };
    ReferenceOptions plain;
    plain.clipping = options.engine.gradient_clipping;
    ReferenceStep reference(model, world, plain);
    FakeRank rank(model, of_rank, joined(std::move(ranks), Over::kLatePeers, device));
    const OpensAtEnd opens{gate};
    std::vector<States> read;
    for (int step = 0; step < 5; ++step) {
      for (int micro = 0; micro < accumulation; ++micro) {
        std::vector<Gradients> by_rank;
        for (int i = 0; i < world; ++i) by_rank.push_back(all_gradients(model, step, micro, i));
        if (step == kOverflows) by_rank.back()[0]->front() = std::numeric_limits<float>::infinity();
        rank.forward();
        add_all(rank, by_rank[static_cast<std::size_t>(r)], {}, micro + 1 == accumulation);
        reference.add(by_rank, true);
      }
      std::vector<GroupScalars> groups = groups_of(step);
      reference.step(groups, loss_scale);
      rank.engine().finish_step();  // no job of the last step is left
      if (step > 0) gate.close();
      rank.engine().step(groups, loss_scale, dtype == DType::kFloat16);
      for (GroupScalars& group : groups) group.lr = 1e3;  // of a later step
      rank.expect_weights(reference.weights());
      if (step != kOverflows && step != 4) continue;
      if (looks) device->at_event = [&] { gate.open(); };
      if (!looks) gate.open();
      read.push_back(states_of(rank));
      device->at_event = nullptr;
    }
    expect_same_weights(rank, reference);
    EXPECT_EQ(jobs > 0, options.engine.states.tier == memory::Tier::kHost);
    return read;
  }
};

class SlowLane : public ::testing::TestWithParam<std::tuple<int, int>> {};  // stage, world

// Without offload, with the host's lane alone, and with both in a random deal.
enum class Update { kThere, kHost, kBoth };

SlowCase slow_case(DType dtype, int stage, int world, int accumulation, Update update) {
  SlowCase c{dtype, world, accumulation, {}};
  EngineOptions& engine = c.options.engine;
  engine.stage = stage;
  engine.gradient_clipping = 0.25;
  engine.late_norm = dtype != DType::kFloat16;
  if (update == Update::kThere) return c;
  engine.states.tier = engine.gradient_tier = memory::Tier::kHost;
  engine.gradients_in_16 = accumulation == 1;
  engine.lanes = {UpdateWhere::kHost, 2, {}, Numel(1 << 15), {}};
  if (update == Update::kBoth) {
    engine.lanes.seed = 3 + static_cast<std::uint64_t>(accumulation);
    // Peers gather no weights that rest on the host.
    if (stage == 3 && world == 1) engine.weights.tier = memory::Tier::kHost;
  }
  c.looks = update == Update::kHost && dtype == DType::kFloat32;
  return c;
}

TEST_P(SlowLane, HasTheBitsOfARunWithoutOffload) {
  const auto [stage, world] = GetParam();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    plan::ModelBuilder builder = small_builder(dtype);
    builder.linear(0, "large", 40'000, dtype);  // of two parts
    const FakeModel model(builder);
    for (const int accumulation : {1, 4}) {
      if (dtype == (accumulation == 1 ? DType::kFloat32 : DType::kFloat16)) continue;  // for speed
      std::vector<std::vector<States>> wanted;                                         // by rank
      for (const Update update : {Update::kThere, Update::kHost, Update::kBoth}) {
        SCOPED_TRACE(fmt::format("{} accumulation {} update {}", name_of(dtype), accumulation,
                                 static_cast<int>(update)));
        const SlowCase c = slow_case(dtype, stage, world, accumulation, update);
        std::vector<std::vector<States>> found(static_cast<std::size_t>(world));
        expect_no_errors(run_ranks(world, [&](int r, std::shared_ptr<comm::Collectives> ranks) {
          found[static_cast<std::size_t>(r)] = c.train(model, r, std::move(ranks));
        }));
        if (update == Update::kThere) wanted = found;
        EXPECT_TRUE(found == wanted);
      }
    }
  }
}

// Lion beside AdamW, and states of 8 bits beside others: the bits of whole parameters.
TEST_P(SlowLane, UpdatesByTheRuleOfEachParameter) {
  const auto [stage, world] = GetParam();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    plan::ModelBuilder builder = small_builder(dtype);
    builder.linear(0, "large", 40'001, dtype);
    for (std::size_t p = 0; p < builder.params.size(); ++p) {
      plan::ParamSpec& spec = builder.params[p];
      if (p % 3 == 0) spec.rule = UpdateRule::kLion;
      if (spec.numel() > Numel(256)) spec.states = plan::StateForm::k8Bit;
    }
    const FakeModel model(builder);
    std::vector<std::vector<States>> wanted;
    for (const Update update : {Update::kThere, Update::kHost, Update::kBoth}) {
      SCOPED_TRACE(fmt::format("{} update {}", name_of(dtype), static_cast<int>(update)));
      const SlowCase c = slow_case(dtype, stage, world, 1, update);
      std::vector<std::vector<States>> found(static_cast<std::size_t>(world));
      expect_no_errors(run_ranks(world, [&](int r, std::shared_ptr<comm::Collectives> ranks) {
        found[static_cast<std::size_t>(r)] = c.train(model, r, std::move(ranks));
      }));
      if (update == Update::kThere) wanted = found;
      EXPECT_TRUE(found == wanted);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(StagesAndWorlds, SlowLane,
                         ::testing::Values(std::tuple(1, 1), std::tuple(1, 2), std::tuple(3, 1),
                                           std::tuple(3, 3)));

}  // namespace
}  // namespace strata::engine::fake

// The ways in which values get into the engine, apart from those that a model on the CPU takes by
// default; and the state that a failed start leaves. Ranks are threads of this process.
#include "strata/torch/start/adoption.h"

#include <gmock/gmock.h>

#include <functional>

#include "comm/grouped_ranks.h"
#include "strata/base/error.h"
#include "strata/offload/memory_store.h"
#include "strata/torch/start/host_export.h"
#include "strata/torch/start/host_intake.h"
#include "torch/live_engines.h"

namespace strata::torch {
namespace {

using testing::bring_in;
using testing::config_of;
using testing::gathered_at_the_end;
using testing::Given;
using ::testing::HasSubstr;
using testing::kHere;
using testing::make_net;
using testing::make_nets;
using testing::Net;
using testing::on_live_engines;
using testing::rounded;
using testing::run_ranks;
using testing::values_of;

class HostIntakeAtStage : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, HostIntakeAtStage, ::testing::Values(1, 3));

TEST_P(HostIntakeAtStage, EveryRankBringsItsPartAndAllLearnWhatDiffers) {
  on_live_engines(3, GetParam(), [&](ShardedModel& model, const auto& parameters) {
    comm::Collectives& collectives = model.engine().collectives();
    const int rank = collectives.rank();
    std::vector<at::Tensor> expected;
    for (const ModelParameter& parameter : parameters) expected.push_back(rounded(parameter));
    // Rank 1 alone has another number at the place that it owns of this parameter, if of any.
    constexpr int kParam = 6;
    const auto [begin, end] = model.engine().weights().owned_range(kParam);
    double where[] = {rank == 1 && begin < end ? static_cast<double>(begin.value) : -1.0};
    collectives.all_reduce(where, comm::ReduceOp::kMax);
    ASSERT_GE(where[0], 0.0);
    const auto place = static_cast<std::int64_t>(where[0]);
    if (rank == 1) parameters[kParam].variable.detach().view({-1})[place] = 77.0;
    expected[kParam].view({-1})[place] = 77.0;

    const Given given = bring_in(model, parameters);
    EXPECT_TRUE(given.differs);
    EXPECT_EQ(given.complete, GetParam() == 3);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::equal(given.values[i], expected[i])) << "parameter " << i;
      for (const Comparison::Run& run : given.runs[i]) {
        const bool holds =
            i == kParam && run.begin == static_cast<std::size_t>(4 * place) / kBlock.size();
        EXPECT_EQ(run.differs, holds) << "parameter " << i << ", block " << run.begin;
      }
    }
  });
}

TEST_P(HostIntakeAtStage, WhatIsStoredIsGatheredWhileTheRestIsLookedAt) {
  on_live_engines(3, GetParam(), [&](ShardedModel& model, const auto& parameters) {
    const Given given = bring_in(model, parameters);
    EXPECT_FALSE(given.differs);
    for (std::size_t i = 0; i < parameters.size(); ++i)
      EXPECT_TRUE(at::equal(given.values[i], rounded(parameters[i]))) << "parameter " << i;
    EXPECT_EQ(gathered_at_the_end(model.engine().init_report()), Bytes());
  });
}

// Rank 2 holds the same slices as rank 0, which then does not keep any of its blocks alone.
TEST_P(HostIntakeAtStage, AReplicaOfTheFirstRanksSliceIsComparedWithIt) {
  constexpr int kWorld = 4;
  constexpr int kParam = 6;
  const std::vector<Net> nets = make_nets(kWorld, 4, 1200);
  comm::conformance::GroupedRanks groups(kWorld, 2);
  run_ranks(groups, kWorld, [&](const std::shared_ptr<comm::Collectives>& collectives) {
    const auto rank = static_cast<std::size_t>(collectives->rank());
    const ModuleDescription description = describe_module(*nets[rank]);
    ShardedModel model(description.input, config_of(GetParam(), kWorld), engine::UpdateRule::kNone,
                       make_runtime(kHere, 2, collectives), "engine");
    const std::vector<ModelParameter>& parameters = description.input.parameters;
    const auto [begin, end] = model.engine().weights().owned_range(kParam);
    ASSERT_EQ(rank % 2 == 0, begin == Numel() && Numel(kBlock.value / 4) <= end);
    std::vector<ModelParameter> changed = parameters;
    for (ModelParameter& parameter : changed)
      parameter.variable = at::ones(parameter.shape, at::TensorOptions().dtype(at::kFloat));
    if (rank == 2) changed[kParam].variable.view({-1})[0] = 77.0;
    const Given given = bring_in(model, changed);
    for (std::size_t i = 0; i < changed.size(); ++i) {
      for (const Comparison::Run& run : given.runs[i])
        EXPECT_EQ(run.differs, i == kParam && run.begin == 0) << i << ", block " << run.begin;
    }
    model.destroy(false);
  });
}

TEST(HostExport, CopiesWhatTheRingHoldsManyTimesOver) {
  const Net net = make_net(1, 5);
  const ModuleDescription description = describe_module(*net);
  ShardedModel model(description.input, config_of(0, 1), engine::UpdateRule::kNone,
                     make_runtime(kHere, 1, comm::LocalGroup(1).rank(0)), "engine");
  ThreadPool threads(3);
  engine::InitReport::Phase phase(model.engine().init_report(), "move out", Bytes());
  HostExport way(model.engine(), threads, phase);
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> targets;
  for (const std::int64_t numel : {1, 25'000'003, 0, 63, 5'000'000, 1'000'001}) {
    sources.push_back(at::randint(0, 256, {numel}, at::TensorOptions().dtype(at::kByte)));
    targets.push_back(empty_on_host(sources.back()));
    const auto bytes = static_cast<std::size_t>(numel);
    way.add({static_cast<std::byte*>(targets.back().mutable_data_ptr()), bytes},
            {static_cast<const std::byte*>(sources.back().const_data_ptr()), bytes});
  }
  way.flush();
  for (std::size_t i = 0; i < sources.size(); ++i) EXPECT_TRUE(at::equal(sources[i], targets[i]));
}

// Refuses to hold more than `most` blocks.
class SmallStore final : public offload::StateStore {
 public:
  SmallStore(std::shared_ptr<offload::StateStore> store, int most)
      : store_(std::move(store)), most_(most) {}
  memory::Tier tier() const override { return store_->tier(); }
  std::vector<offload::BlockId> add_all(std::vector<offload::BlockSpec> blocks) override {
    most_ -= static_cast<int>(blocks.size());
    if (most_ < 0) throw OutOfMemoryError("the store is full");
    return store_->add_all(std::move(blocks));
  }
  void take_back(std::span<const offload::BlockId> added) noexcept override {
    store_->take_back(added);
  }
  Bytes size_of(offload::BlockId block) const override { return store_->size_of(block); }
  std::vector<std::unique_ptr<offload::Lease>> fetch_all(std::span<const offload::Part> parts,
                                                         offload::Access access) override {
    return store_->fetch_all(parts, access);
  }

 private:
  std::shared_ptr<offload::StateStore> store_;
  int most_;
};

// The message of initialize when memory has room for `blocks` blocks of state; the model has 4
// units, whose masters are two blocks each.
std::string start_with_room_for(int blocks, const std::string& tier, const Net& net) {
  ModelRuntime runtime = make_runtime(kHere, 1, comm::LocalGroup(1).rank(0));
  runtime.states = std::make_shared<SmallStore>(
      std::shared_ptr(offload::MemoryStore::on_device(*runtime.device)), blocks);
  const ModuleDescription description = describe_module(*net);
  try {
    const ShardedModel model(description.input, config_of(3, 1, tier), engine::UpdateRule::kAdamW,
                             runtime, "engine");
    return "no error";
  } catch (const OutOfMemoryError& error) {
    return error.what();
  }
}

TEST(FailedStart, LeavesTheModelAsItWas) {
  for (const std::string tier : {"device_copy", "host"}) {
    for (const int blocks : {0, 4, 10}) {  // before, amid and after the values
      const Net net = make_net(4, 30);
      const std::vector<at::Tensor> before = values_of(net);
      EXPECT_EQ(start_with_room_for(blocks, tier, net), "the store is full");
      const std::vector<at::Tensor> after = values_of(net);
      for (std::size_t i = 0; i < before.size(); ++i)
        EXPECT_TRUE(at::equal(before[i], after[i])) << tier << ", parameter " << i;
      for (const at::Tensor& p : net->parameters()) EXPECT_TRUE(p.requires_grad());
    }
  }
}

TEST(FailedStart, SaysSoWhereTheModelsMemoryHadBeenGivenUp) {
  const Net net = make_net(4, 30);
  EXPECT_THAT(start_with_room_for(4, "device_grow", net),
              ::testing::AllOf(HasSubstr("the store is full. The memory of 4 of 8 parameters"),
                               HasSubstr("build the model again")));
  int empty = 0;
  for (const at::Tensor& p : net->parameters()) empty += p.numel() == 0 ? 1 : 0;
  EXPECT_EQ(empty, 4);
}

TEST(FailedStart, CanBeTriedAgain) {
  const Net net = make_net(4, 30);
  const std::vector<at::Tensor> before = values_of(net);
  EXPECT_EQ(start_with_room_for(4, "device_copy", net), "the store is full");
  ModelRuntime runtime = make_runtime(kHere, 1, comm::LocalGroup(1).rank(0));
  ShardedModel model(describe_module(*net).input, config_of(3, 1), engine::UpdateRule::kAdamW,
                     runtime, "engine");
  model.destroy(true);
  const std::vector<at::Tensor> after = values_of(net);
  for (std::size_t i = 0; i < before.size(); ++i)
    EXPECT_TRUE(at::equal(before[i].to(at::kBFloat16), after[i])) << "parameter " << i;
}

}  // namespace
}  // namespace strata::torch

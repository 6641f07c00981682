// Steps in which an optimizer needs whole parameters: the bits of the plain loop over every kind of
// collectives.
#include "strata/engine/optimize/whole_parameters.h"

#include <map>

#include "engine/core/external_cases.h"
#include "strata/engine/optimize/native_optimizer.h"

namespace strata::engine::fake {
namespace {

class WholeParametersTest : public ::testing::TestWithParam<Over> {};

Case whole_case(DType dtype, int world, int stage, Over over, UpdateRule rule) {
  Case c{dtype, world, 2, {}, dtype == DType::kFloat16 ? 1024.0 : 1.0, over};
  c.options.rule = rule;
  c.options.engine.stage = stage;
  c.options.engine.gradient_clipping = world == 3 ? 0.0 : 0.25;
  c.options.prepares_first = world > 1;
  // Where streams run late, the host's instructions work on states of the host.
  if (over == Over::kLatePeers) place_states(c.options.engine, memory::Tier::kHost, "");
  c.begins = update_on_the_host;
  return c;
}

TEST_P(WholeParametersTest, HaveTheBitsOfThePlainLoop) {
  const DType dtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  for (int stage = 0; stage <= 3; ++stage) {
    const DType dtype = dtypes[stage % 3];
    const FakeModel model(uneven_builder(dtype));
    // Every world in one kind of collectives; the others have two of them, in turns.
    for (int world = 1; world <= 3; ++world) {
      if (GetParam() != Over::kThreads && world != 3 - stage % 2) continue;
      expect_bits_of_reference(model,
                               whole_case(dtype, world, stage, GetParam(), UpdateRule::kWhole),
                               plain_script(model));
    }
  }
  const FakeModel mixed(mixed_builder());  // fp64 weights are more than their masters
  expect_bits_of_reference(mixed,
                           whole_case(DType::kFloat32, 2, 3, GetParam(), UpdateRule::kTogether),
                           plain_script(mixed));
}

INSTANTIATE_TEST_SUITE_P(Collectives, WholeParametersTest,
                         ::testing::Values(Over::kThreads, Over::kPeers, Over::kPeersGather,
                                           Over::kPeersReduce, Over::kLatePeers, Over::kJoint));

TEST(WholeParameters, EachHasOneOwnerAndTheLargestGoesFirst) {
  const FakeModel model(uneven_builder(DType::kFloat32));
  std::vector<std::vector<int>> owned(3);
  std::vector<std::int64_t> elements(3);
  expect_no_errors(run_ranks(3, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.rule = UpdateRule::kWhole;
    FakeRank rank(model, options, std::move(collectives));
    auto& external = dynamic_cast<ExternalOptimizer&>(*rank.engine().optimizer());
    const auto index = static_cast<std::size_t>(r);
    for (const ExternalSegment& segment : external.segments()) {
      owned[index].push_back(segment.param);
      elements[index] += static_cast<std::int64_t>(segment.weight.size());
      EXPECT_EQ(Numel(segment.weight.size()), model.numel(segment.param));
    }
  }));
  std::map<int, int> owners;
  std::int64_t largest = 0;
  for (const auto& of_rank : owned) {
    for (const int param : of_rank) ++owners[param];
  }
  for (int p = 0; p < model.count(); ++p) {
    const bool counts =
        model.params[static_cast<std::size_t>(p)].trainable && model.numel(p) > Numel();
    EXPECT_EQ(owners[p], counts ? 1 : 0) << p;
    if (counts) largest = std::max(largest, model.numel(p).value);
  }
  EXPECT_EQ(*std::ranges::max_element(elements), largest) << "it is alone on its rank";
}

// Some parameters are matrices to Muon, whose products reverse the order of their elements here.
FakeModel model_of_muon(DType dtype) {
  plan::ModelBuilder builder = uneven_builder(dtype);
  for (plan::ParamSpec& param : builder.params) {
    if (param.numel() > Numel(100)) param.rule = UpdateRule::kMuon;
  }
  return FakeModel(builder);
}

using Weights = std::vector<std::vector<std::byte>>;

Weights trained_by_muon(DType dtype, int world, int stage, Over over, memory::Tier tier) {
  const FakeModel model = model_of_muon(dtype);
  const testing::TemporaryFolder folder;
  Weights weights(static_cast<std::size_t>(model.count()));
  expect_no_errors(run_ranks(world, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.rule = UpdateRule::kAdamW;
    options.engine.stage = stage;
    options.engine.gradient_clipping = 0.25;
    if (tier != memory::Tier::kDevice) place_states(options.engine, tier, folder.path());
    if (over == Over::kLatePeers) options.device = comm::conformance::late_device(r);
    FakeRank rank(model, options, joined(std::move(collectives), over, options.device));
    auto& optimizer = dynamic_cast<NativeOptimizer&>(*rank.engine().optimizer());
    ASSERT_NE(optimizer.muon(), nullptr);
    std::vector<MuonParam> params(static_cast<std::size_t>(model.count()), {0.5, r >= 0});
    optimizer.muon()->set(params, [&](int, std::span<std::byte> values) {
      rank.engine().device().compute_stream().synchronize();
      auto* const all = reinterpret_cast<std::uint16_t*>(values.data());
      std::reverse(all, all + values.size() / 2);
    });
    for (int step = 0; step < kSteps; ++step) {
      rank.groups = groups_of(step);
      for (int micro = 0; micro < 2; ++micro) {
        rank.forward();
        add_all(rank, all_gradients(model, step, micro, r), {}, micro == 1);
      }
      ASSERT_TRUE(rank.engine().step(rank.groups, 1.0, false).applied);
    }
    for (int p = 0; p < model.count(); ++p) {
      const std::vector<std::byte> found = rank.weight(p);
      if (r == 0) weights[static_cast<std::size_t>(p)] = found;
    }
  }));
  return weights;
}

TEST_P(WholeParametersTest, OfMuonHaveTheSameBitsOverEveryKindOfCollectives) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (GetParam() != Over::kThreads && dtype != DType::kBFloat16) continue;
    const int world = dtype == DType::kBFloat16 ? 3 : 2;
    const Weights wanted = trained_by_muon(dtype, world, 0, Over::kThreads, memory::Tier::kDevice);
    for (const int stage : {1, 3})
      EXPECT_EQ(trained_by_muon(dtype, world, stage, GetParam(), memory::Tier::kDevice), wanted);
    EXPECT_EQ(trained_by_muon(dtype, world, 3, GetParam(), memory::Tier::kHost), wanted);
    EXPECT_NE(wanted.front(), std::vector<std::byte>());
  }
}

}  // namespace
}  // namespace strata::engine::fake

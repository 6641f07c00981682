// Steps in which an optimizer needs whole parameters: the bits of the plain loop over every kind of
// collectives.
#include "strata/engine/optimize/whole_parameters.h"

#include <map>

#include "engine/core/external_cases.h"

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

}  // namespace
}  // namespace strata::engine::fake

// Units that go because they are used again too late, though there would be room.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/core/short_passes.h"

namespace strata::engine::fake {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

RankOptions reusing(std::optional<Numel> most) {
  RankOptions options;
  options.engine.max_live = 100_MiB;
  options.engine.prefetch = 0_B;
  options.engine.max_reuse = most;
  return options;
}

TEST(GathererReuse, KeepsAfterForwardWhatBackwardUsesWithinSoManyElements) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, reusing(Numel(2 * kBlock)), std::move(collectives));
    // Behind the last but two, which is in use then, come two blocks before its own turn again.
    for (int pass = 0; pass < 3; ++pass) {
      rank.forward();
      EXPECT_THAT(gathered_units(rank), ElementsAre(6, 7, 8)) << "pass " << pass;
      rank.backward(true, [&](int p) { rank.add(p, noises(1, rank.model().numel(p))); });
      step(rank);
      EXPECT_THAT(gathered_units(rank), IsEmpty());
    }
  });
}

TEST(GathererReuse, OfNothingLeavesTheUnitThatIsUsedNext) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, reusing(Numel()), std::move(collectives));
    for (int pass = 0; pass < 3; ++pass) {
      rank.forward();
      EXPECT_THAT(gathered_units(rank), ElementsAre(7, 8)) << "pass " << pass;
      rank.backward(true, [&](int p) { rank.add(p, noises(1, rank.model().numel(p))); });
      EXPECT_LE(rank.gatherer().sharded().live(), block_bytes() * 2);
      step(rank);
    }
    EXPECT_LE(rank.ledger().peak(memory::Tier::kDevice, memory::Kind::kGathered),
              block_bytes() * 4);
  });
}

TEST(GathererReuse, WithBoundsOfZeroNothingIsWholeButTheUnitInUse) {
  for (const FakeModel& model :
       {model_of_blocks(kBlock, kBlock), model_of_neighbours(kBlock, Numel())}) {
    on_two_ranks([&](auto collectives) {
      FakeRank rank(model, bounds_of_zero(), std::move(collectives));
      for (int pass = 0; pass < 3; ++pass) {
        rank.engine().begin_forward();
        for (const plan::ScopeSpec& scope : model.plan.scopes) {
          rank.in_scope(scope, [&] { EXPECT_EQ(gathered_units(rank), scope.units); });
        }
        rank.backward(true, [&](int p) {
          EXPECT_THAT(gathered_units(rank),
                      ElementsAre(model.plan.unit_of_param[static_cast<std::size_t>(p)]));
          rank.add(p, noises(1, rank.model().numel(p)));
        });
        step(rank);
        EXPECT_THAT(gathered_units(rank), IsEmpty());
      }
      EXPECT_EQ(rank.ledger().peak(memory::Tier::kDevice, memory::Kind::kGathered), block_bytes());
    });
  }
}

TEST(GathererReuse, IsNoBoundWhereNoneIsStated) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  on_two_ranks([&](auto collectives) {
    FakeRank rank(model, reusing(std::nullopt), std::move(collectives));
    rank.forward();
    EXPECT_EQ(gathered_units(rank).size(), 9U);
    rank.backward(true, [&](int p) { rank.add(p, noises(1, rank.model().numel(p))); });
    step(rank);
  });
}

}  // namespace
}  // namespace strata::engine::fake

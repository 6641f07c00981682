// Gathers over collectives that all ranks must call alike: a rank that is short of memory takes no
// other way than its peers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/collective_network.h"
#include "device/limited_device.h"
#include "engine/core/faulty_device.h"
#include "engine/core/short_passes.h"

namespace strata::engine::fake {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Two ranks whose gathers need both; rank 1's device is `faulty` from the start of `body`.
void on_a_network(const FakeModel& model, const std::function<void(FakeRank&, Fault&)>& body) {
  expect_no_errors(run_ranks(2, [&](int, std::shared_ptr<comm::Collectives> ranks) {
    const auto device = std::make_shared<FaultyDevice>();
    device->ahead = false;
    RankOptions options;
    options.device = device;
    options.engine.max_live = block_bytes() * 5;
    options.engine.prefetch = block_bytes() * 2;
    FakeRank rank(model, options,
                  std::make_shared<comm::conformance::CollectiveNetwork>(std::move(ranks)));
    body(rank, device->gathered);
  }));
}

TEST(SharedGathers, APrefetchThatOneRankHasNoMemoryForIsLeftOutByAll) {
  const FakeModel model = model_of_blocks(kBlock, 2 * kBlock);
  for (int allocation = 0; allocation < 6; ++allocation) {
    SCOPED_TRACE(allocation);
    on_a_network(model, [&](FakeRank& rank, Fault& gathered) {
      if (rank.collectives().rank() == 1) gathered.arm(allocation);
      for (int i = 0; i < 3; ++i) {
        train_one_pass(rank);
        step(rank);
      }
      const auto counts = rank.collectives().all_gather_text(
          std::to_string(rank.engine().recorder().counts().gathers));
      EXPECT_EQ(counts[0], counts[1]);
    });
  }
}

TEST(SharedGathers, AUnitThatOneRankCannotGatherAtAllIsAnErrorOnAll) {
  const FakeModel model = model_of_blocks(kBlock, kBlock);
  const Bytes limit = block_bytes() * 2;
  expect_no_errors(run_ranks(2, [&](int, std::shared_ptr<comm::Collectives> ranks) {
    const bool small = ranks->rank() == 1;
    RankOptions options;
    options.engine.stage = 3;
    options.engine.prefetch = 0_B;
    options.device = std::make_shared<device::LimitedDevice>(small ? limit : 100_MiB);
    FakeRank rank(model, options,
                  std::make_shared<comm::conformance::CollectiveNetwork>(std::move(ranks)));
    rank.gatherer().acquire(1);
    rank.gatherer().acquire(2);
    try {
      rank.gatherer().acquire(3);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const OutOfMemoryError& error) {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("the weights of unit 'layers.2' cannot be gathered"),
                        HasSubstr("'layers.0' (16.0 KiB), 'layers.1' (16.0 KiB)"),
                        HasSubstr("out of memory")));
      EXPECT_THAT(error.what(), small ? HasSubstr("") : HasSubstr("rank 1: "));
    }
    EXPECT_FALSE(rank.gatherer().pinned(3));
    rank.gatherer().release(1);
    rank.gatherer().acquire(3);
    rank.gatherer().release(3);
    rank.gatherer().release(2);
  }));
}

}  // namespace
}  // namespace strata::engine::fake

#include "comm/collectives_conformance.h"
#include "strata/comm/host/host_collectives.h"

namespace strata::comm::conformance {
namespace {

std::vector<std::string> run_local(int world_size, std::chrono::milliseconds timeout,
                                   const RankBody& body) {
  CommOptions options;
  options.timeout = timeout;
  LocalGroup group(world_size, options);
  return run_as_threads(
      world_size, [&](int rank) { return group.rank(rank); }, body);
}

Backend local_backend() {
  return {"local", run_local};
}

INSTANTIATE_TEST_SUITE_P(Local, CollectivesMoveData, testing::Values(local_backend()));
INSTANTIATE_TEST_SUITE_P(Local, CollectivesReportErrors, testing::Values(local_backend()));
INSTANTIATE_TEST_SUITE_P(Local, OneSidedGathers, testing::Values(local_backend()));

TEST(LocalGroup, ServesSixtyFourRanks) {
  const auto results = run_local(64, std::chrono::seconds(60), [](Collectives& c) {
    check_reduction(c, 33, 1.0F, false);
    auto buffer = c.allocate("weights", 501_B);
    fill(buffer->local(), c.rank());
    c.barrier();
    gather_from_all(c, *buffer, 501);
    double rank = c.rank();
    c.all_reduce(std::span(&rank, 1), ReduceOp::kSum);
    require(rank == 64.0 * 63.0 / 2.0, "sum of ranks");
    c.barrier();
    return std::string();
  });
  EXPECT_THAT(results, testing::Each(""));
}

TEST(LocalGroup, GivesEachRankOnce) {
  LocalGroup group(2);
  auto first = group.rank(1);
  EXPECT_EQ(first->name(), "local");
  EXPECT_THROW(static_cast<void>(group.rank(1)), UsageError);
  EXPECT_THROW(static_cast<void>(group.rank(2)), UsageError);
  EXPECT_THROW(LocalGroup(0), UsageError);
}

TEST(LocalGroup, MayEndBeforeItsCollectivesAndTheyBeforeBuffersAndWorks) {
  std::unique_ptr<SharedBuffer> buffer;
  std::unique_ptr<Work> work;
  float result = 0;
  {
    std::unique_ptr<Collectives> collectives;
    {
      LocalGroup group(2);
      collectives = group.rank(0);
    }
    buffer = collectives->allocate("survivor", 8_B);
    work = collectives->reduce_scatter(
        {buffer.get(), 0_B, DType::kFloat32, std::span(&result, 1), 1.0F, false}, "never complete");
    EXPECT_FALSE(work->done());
  }
  EXPECT_THROW(work->wait(), CommError);
  EXPECT_TRUE(work->done());
  buffer->local()[0] = std::byte{1};
}

TEST(LocalGroup, NamesWhatTheHangingRankIsDoing) {
  CommOptions options;
  options.timeout = std::chrono::milliseconds(50);
  LocalGroup group(2, options);
  auto waiting = group.rank(0);
  auto busy = group.rank(1);
  try {
    waiting->barrier();
    FAIL() << "no error";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("rank 1 lives but did not come"));
    EXPECT_THAT(error.what(), testing::HasSubstr("has started 0 operations, its last call: none"));
  }
}

}  // namespace
}  // namespace strata::comm::conformance

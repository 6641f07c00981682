// Tests which transport a forecast assumes for a job that does not run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "strata/base/error.h"
#include "strata/forecast/memory_forecast.h"

namespace strata::forecast {
namespace {

using comm::among;
using comm::kBackendTraits;
using comm::kHostMemoryTraits;
using comm::kPeerTraits;

engine::Config config(const std::string& more) {
  return engine::Config::parse(R"({"train_batch_size": 64, "zero_optimization": {"stage": 3)" +
                               more + "}}");
}

TEST(JobTraits, FollowTheDevicesAndTheHosts) {
  EXPECT_EQ(traits_of_job(config(""), {8, true, 8}), among(kPeerTraits, 0, 8));
  EXPECT_EQ(traits_of_job(config(""), {8, true, 4}), among(kBackendTraits, 0, 8));
  EXPECT_EQ(traits_of_job(config(""), {8, false, 0}), among(kHostMemoryTraits, 0, 8));
  EXPECT_EQ(traits_of_job(config(""), {8, false, 4}), among(kBackendTraits, 0, 8));
}

TEST(JobTraits, OfShardGroupsAreOfBothParts) {
  const comm::Traits pods = traits_of_job(config(R"(, "mics_shard_size": 4)"), {8, true, 4});
  EXPECT_EQ(pods, grouped_traits(among(kPeerTraits, 0, 4), among(kBackendTraits, 0, 2),
                                 comm::Slices::kReplicated));
  const comm::Traits secondary =
      traits_of_job(config(R"(, "zero_hpz_partition_size": 4)"), {8, true, 4});
  EXPECT_EQ(secondary.place, (comm::ShardPosition{0, 8, 0, 1, 2}));
}

TEST(JobTraits, OfNoRanksAreRefused) {
  EXPECT_THROW(traits_of_job(config(""), {0, true, 0}), UsageError);
  EXPECT_THROW(traits_of_job(config(""), {2, true, -1}), UsageError);
}

}  // namespace
}  // namespace strata::forecast

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <latch>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "strata/base/thread_pool.h"

namespace strata {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Two nodes of two cores with two hardware threads each, numbered as most servers are.
std::vector<HostCore> server() {
  return {{0, 0, 0}, {1, 0, 1}, {2, 1, 2}, {3, 1, 3}, {4, 0, 0}, {5, 0, 1}, {6, 1, 2}, {7, 1, 3}};
}

TEST(RankCores, OfARankAreOneNodesWithAllTheirHardwareThreads) {
  EXPECT_THAT(part_of_rank(server(), 0, 2), ElementsAre(0, 1, 4, 5));
  EXPECT_THAT(part_of_rank(server(), 1, 2), ElementsAre(2, 3, 6, 7));
  EXPECT_THAT(part_of_rank(server(), 1, 4), ElementsAre(1, 5));
}

TEST(RankCores, AreDividedWithoutOverlapOrRemainder) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    std::vector<int> all;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::vector<int> part = part_of_rank(server(), rank, ranks);
      EXPECT_FALSE(part.empty()) << rank << " of " << ranks;
      all.insert(all.end(), part.begin(), part.end());
    }
    EXPECT_THAT(all, ::testing::UnorderedElementsAre(0, 1, 2, 3, 4, 5, 6, 7)) << ranks;
  }
}

TEST(RankCores, AreNobodysWhereThereAreTooFew) {
  EXPECT_THAT(part_of_rank(server(), 0, 9), IsEmpty());
  EXPECT_THAT(part_of_rank({}, 0, 1), IsEmpty());
  EXPECT_THAT(part_of_rank(server(), 2, 2), IsEmpty());
}

TEST(RankCores, HavePlacesWhereTheSystemTellsThem) {
  const auto folder = std::filesystem::path(::testing::TempDir()) /
                      ("cores-" + std::to_string(std::random_device()()));
  std::filesystem::create_directories(folder / "cpu5/node1");
  std::filesystem::create_directories(folder / "cpu5/topology");
  std::ofstream(folder / "cpu5/topology/thread_siblings_list") << "1,5\n";
  const std::vector<int> cores{5, 6};
  EXPECT_THAT(places_of(cores, folder), ElementsAre(HostCore{5, 1, 1}, HostCore{6, 0, 6}));
  std::filesystem::remove_all(folder);
}

TEST(RankCores, AreNotBoundForOneRankNorForOneThread) {
  EXPECT_THAT(cores_to_bind(0, 1, 8), IsEmpty());
  EXPECT_THAT(cores_to_bind(0, 2, 1), IsEmpty());
  EXPECT_THAT(cores_to_bind(0, 2, 1 << 20), IsEmpty());
}

TEST(RankCores, BindAPoolsOwnThreadsAlone) {
  const std::vector<int> before = allowed_cores();
  ASSERT_FALSE(before.empty());
  ThreadPool pool(3, {before.back()});
  const auto caller = std::this_thread::get_id();
  std::latch all_inside(3);
  std::mutex mutex;
  std::vector<std::vector<int>> of_workers;
  pool.parallel_for(3, 1, [&](std::int64_t, std::int64_t) {
    all_inside.arrive_and_wait();
    const std::lock_guard lock(mutex);
    if (std::this_thread::get_id() != caller) of_workers.push_back(allowed_cores());
  });
  EXPECT_THAT(of_workers, ElementsAre(ElementsAre(before.back()), ElementsAre(before.back())));
  EXPECT_EQ(allowed_cores(), before);
}

}  // namespace
}  // namespace strata

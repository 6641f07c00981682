#include "strata/torch/base/host_threads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

namespace strata::torch {
namespace {

// Sets a launcher's variable about this host for the time of a test.
class Launcher {
 public:
  explicit Launcher(const char* ranks_here, const char* name = "LOCAL_WORLD_SIZE") : name_(name) {
    if (const char* const text = std::getenv(name_)) before_ = text;
    ranks_here == nullptr ? ::unsetenv(name_) : ::setenv(name_, ranks_here, 1);
  }
  ~Launcher() { before_ ? ::setenv(name_, before_->c_str(), 1) : ::unsetenv(name_); }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

TEST(HostThreads, AreWhatTheConfigurationSays) {
  EXPECT_EQ(host_threads(3, 1), 3);
  EXPECT_EQ(host_threads(100, 1000), 100);
}

TEST(HostThreads, OfARankAreItsPartOfTheHostsCores) {
  const Launcher launcher(nullptr);
  EXPECT_EQ(host_threads(std::nullopt, 1), std::min(usable_cores(), kMostHostThreads));
  EXPECT_EQ(host_threads(std::nullopt, 1 << 20), 1);
}

TEST(HostThreads, DoNotDependOnWhatTorchWouldTake) {
  const Launcher launcher("1");
  ::setenv("OMP_NUM_THREADS", "1", 1);
  EXPECT_EQ(host_threads(std::nullopt, 64), std::min(usable_cores(), kMostHostThreads));
}

TEST(HostThreads, OfTheRankThatReadsAllAreWhatTheOthersLeave) {
  const Launcher launcher(nullptr);
  EXPECT_EQ(reference_threads(3, 2), 3);
  for (const int world : {1, 2, 4, 1 << 20}) {
    const int share = host_threads(std::nullopt, world);
    EXPECT_GE(reference_threads(std::nullopt, world), share);
    EXPECT_LE(reference_threads(std::nullopt, world), usable_cores());
  }
  const int alone = std::min(usable_cores(), 2 * kMostHostThreads);
  EXPECT_EQ(reference_threads(std::nullopt, 1), alone);
}

TEST(HostThreads, ReadWithinBounds) {
  EXPECT_EQ(reading_options(1).threads, 4);
  EXPECT_EQ(reading_options(16).threads, 12);  // the others queue copies and map memory
  EXPECT_EQ(reading_options(64).threads, 16);
}

TEST(HostThreads, AreBoundToWhatIsThisRanksAlone) {
  const auto cores = [](const char* rank, const char* ranks, int threads) {
    const Launcher of_rank(rank, "LOCAL_RANK");
    const Launcher of_host(ranks);
    return host_cores(threads);
  };
  EXPECT_TRUE(cores(nullptr, "2", 2).empty());
  EXPECT_TRUE(cores("0", nullptr, 2).empty());
  EXPECT_TRUE(cores("first", "2", 2).empty());
  EXPECT_TRUE(cores("0", "1", 2).empty());
  const std::vector<int> first = cores("0", "2", 2);
  for (const int core : cores("1", "2", 2)) EXPECT_EQ(std::ranges::count(first, core), 0);
}

TEST(HostThreads, CountTheRanksOfThisHostAlone) {
  EXPECT_GE(usable_cores(), 1);
  {
    const Launcher launcher("4");
    EXPECT_EQ(ranks_of_host(16), 4);
    EXPECT_EQ(ranks_of_host(2), 2);  // a group of some of the launcher's ranks
  }
  for (const char* nonsense : {"", "0", "-1", "four", "4 "}) {
    const Launcher launcher(nonsense);
    EXPECT_EQ(ranks_of_host(16), 16) << "'" << nonsense << "'";
  }
}

}  // namespace
}  // namespace strata::torch

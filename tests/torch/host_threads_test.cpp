#include "strata/torch/base/host_threads.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>

namespace strata::torch {
namespace {

// What a launcher says of this host, for the time of a test.
class Launcher {
 public:
  explicit Launcher(const char* ranks_here) {
    if (const char* const text = std::getenv(kName)) before_ = text;
    ranks_here == nullptr ? ::unsetenv(kName) : ::setenv(kName, ranks_here, 1);
  }
  ~Launcher() { before_ ? ::setenv(kName, before_->c_str(), 1) : ::unsetenv(kName); }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

 private:
  static constexpr const char* kName = "LOCAL_WORLD_SIZE";
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

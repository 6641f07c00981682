#include "strata/memory/ledger.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace strata::memory {
namespace {

TEST(Ledger, CountsByTierAndKindWhileAChargeLives) {
  const auto ledger = std::make_shared<Ledger>();
  const Charge weights(ledger, Tier::kDevice, Kind::kWeights, 100_B);
  {
    const Charge gathered(ledger, Tier::kDevice, Kind::kGathered, 40_B);
    const Charge staging(ledger, Tier::kHost, Kind::kStaging, 7_B);
    EXPECT_EQ(ledger->held(Tier::kDevice, Kind::kWeights), 100_B);
    EXPECT_EQ(ledger->held(Tier::kDevice, Kind::kGathered), 40_B);
    EXPECT_EQ(ledger->held(Tier::kDevice), 140_B);
    EXPECT_EQ(ledger->held(Tier::kHost), 7_B);
    EXPECT_EQ(ledger->held(Tier::kNvme), 0_B);
  }
  EXPECT_EQ(ledger->held(Tier::kDevice), 100_B);
  EXPECT_EQ(ledger->held(Tier::kHost), 0_B);
}

TEST(Ledger, PeakOfATierIsThatOfItsTotalAndNotTheSumOfTheKinds) {
  const auto ledger = std::make_shared<Ledger>();
  { const Charge first(ledger, Tier::kDevice, Kind::kWeights, 100_B); }
  { const Charge second(ledger, Tier::kDevice, Kind::kGradients, 60_B); }
  EXPECT_EQ(ledger->peak(Tier::kDevice, Kind::kWeights), 100_B);
  EXPECT_EQ(ledger->peak(Tier::kDevice, Kind::kGradients), 60_B);
  EXPECT_EQ(ledger->peak(Tier::kDevice), 100_B);
}

TEST(Ledger, ResetPeaksStartsFromWhatIsHeldNow) {
  const auto ledger = std::make_shared<Ledger>();
  const Charge stays(ledger, Tier::kHost, Kind::kStaging, 10_B);
  { const Charge goes(ledger, Tier::kHost, Kind::kStaging, 90_B); }
  ledger->reset_peaks();
  EXPECT_EQ(ledger->peak(Tier::kHost), 10_B);
  EXPECT_EQ(ledger->peak(Tier::kHost, Kind::kStaging), 10_B);
}

TEST(Ledger, AMovedChargeIsGivenBackOnce) {
  const auto ledger = std::make_shared<Ledger>();
  Charge first(ledger, Tier::kHost, Kind::kStaging, 10_B);
  Charge second(std::move(first));
  EXPECT_EQ(ledger->held(Tier::kHost), 10_B);
  Charge third(ledger, Tier::kDevice, Kind::kWeights, 5_B);
  third = std::move(second);
  EXPECT_EQ(ledger->held(Tier::kDevice), 0_B);
  EXPECT_EQ(ledger->held(Tier::kHost), 10_B);
  third = Charge();
  EXPECT_EQ(ledger->held(Tier::kHost), 0_B);
}

TEST(Ledger, AGrownChargeGivesBackAllOfIt) {
  const auto ledger = std::make_shared<Ledger>();
  {
    Charge charge(ledger, Tier::kDevice, Kind::kWeights, 10_B);
    charge.grow(5_B);
    EXPECT_EQ(charge.bytes(), 15_B);
    EXPECT_EQ(ledger->held(Tier::kDevice, Kind::kWeights), 15_B);
  }
  EXPECT_EQ(ledger->held(Tier::kDevice), 0_B);
  EXPECT_EQ(ledger->peak(Tier::kDevice), 15_B);
}

TEST(Ledger, CountsHowOftenMemoryOfATierWasTaken) {
  const auto ledger = std::make_shared<Ledger>();
  {
    Charge grows(ledger, Tier::kDevice, Kind::kWeights, 5_B);
    grows.grow(6_B);
    const Charge elsewhere(ledger, Tier::kHost, Kind::kWeights, 1_B);
  }
  EXPECT_EQ(ledger->charges(Tier::kDevice), 2);
  EXPECT_EQ(ledger->charges(Tier::kHost), 1);
}

TEST(Ledger, OutlivesItsLastOwnerWhileAChargeIsHeld) {
  auto ledger = std::make_shared<Ledger>();
  const std::weak_ptr<Ledger> watched = ledger;
  auto charge = std::make_unique<Charge>(ledger, Tier::kHost, Kind::kStaging, 1_B);
  ledger.reset();
  EXPECT_FALSE(watched.expired());
  charge.reset();
  EXPECT_TRUE(watched.expired());
}

TEST(Ledger, ReportsTiersWithPeaksAndTheKindsThatHoldSomething) {
  const auto ledger = std::make_shared<Ledger>();
  EXPECT_EQ(ledger->report(), "nothing held");
  const Charge weights(ledger, Tier::kDevice, Kind::kWeights, 100_B);
  const Charge master(ledger, Tier::kDevice, Kind::kMasterWeights, 200_B);
  { const Charge staging(ledger, Tier::kHost, Kind::kStaging, 7_B); }
  EXPECT_EQ(ledger->report(),
            "device 300 B (peak 300 B): weights 100 B, master weights 200 B; host 0 B (peak 7 B)");
}

TEST(Ledger, EveryTierAndKindHasItsOwnName) {
  std::set<std::string_view> names;
  for (int t = 0; t < kTierCount; ++t) names.insert(name_of(static_cast<Tier>(t)));
  for (int k = 0; k < kKindCount; ++k) names.insert(name_of(static_cast<Kind>(k)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(kTierCount + kKindCount));
}

TEST(Ledger, ThreadsChargeAtTheSameTimeAndNothingIsLost) {
  const auto ledger = std::make_shared<Ledger>();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        Charge charge(ledger, Tier::kDevice, Kind::kGathered, 3_B);
        charge.grow(1_B);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ledger->held(Tier::kDevice), 0_B);
  EXPECT_LE(ledger->peak(Tier::kDevice), 16_B);
}

}  // namespace
}  // namespace strata::memory

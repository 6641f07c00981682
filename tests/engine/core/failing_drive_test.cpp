// Drives that are late and fail, under weights and states, ranks beside each other: a step has the
// bits of the plain loop, or is an error on every rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "engine/core/offloaded_cases.h"
#include "offload/late_file.h"
#include "strata/offload/nvme_store.h"

namespace strata::engine::fake {
namespace {

constexpr int kWorld = 2;
constexpr int kStepsEach = 2;

unsigned seeds() {
  const char* const text = std::getenv("STRATA_DRIVE_SEEDS");
  return text != nullptr ? static_cast<unsigned>(std::strtoul(text, nullptr, 10)) : 500;
}

std::shared_ptr<offload::StateStore> failing_store(device::Device& device, unsigned seed,
                                                   unsigned failing) {
  return offload::make_nvme_store(
      device,
      offload::NvmeStoreOptions{.arena = std::make_shared<offload::StagingArena>(device, 128_KiB),
                                .file = std::make_unique<testing::LateFile>(seed, failing),
                                .verify = seed % 2 == 0});
}

// Returns the message of the error that a rank's training threw; "" without an error.
std::string train(const FakeModel& model, unsigned seed, int r,
                  const std::shared_ptr<comm::Collectives>& collectives) {
  const unsigned failing = r == static_cast<int>(seed % 3) ? 2 + seed % 15 : 0;
  const bool weights_too = seed % 5 != 0;
  RankOptions options;
  options.engine.stage = 3;
  options.engine.gradient_tier = memory::Tier::kHost;
  options.engine.states.tier = memory::Tier::kNvme;
  if (weights_too) options.engine.weights.tier = memory::Tier::kNvme;
  options.engine.max_live = Bytes(1 + std::int64_t{seed % 7} * 4096);
  options.stores = [&](device::Device& device) {
    const unsigned own = seed * 8 + static_cast<unsigned>(r) * 2;
    return Stores{failing_store(device, own, failing),
                  weights_too ? failing_store(device, own + 1, failing) : nullptr};
  };
  ReferenceStep reference(model, kWorld, {});
  try {
    FakeRank rank(model, options, joined(collectives, Over::kJoint));
    for (int step = 0; step < kStepsEach; ++step) {
      rank.forward();
      std::vector<Gradients> by_rank;
      for (int i = 0; i < kWorld; ++i) by_rank.push_back(all_gradients(model, step, 0, i));
      add_all(rank, by_rank[static_cast<std::size_t>(r)], {}, /*boundary=*/true);
      reference.add(by_rank, true);
      reference.step(groups_of(step), 1.0);
      rank.engine().step(groups_of(step), 1.0, false);
      rank.expect_weights(reference.weights());
      expect_same_weights(rank, reference);
    }
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(FailingDrive, IsAnErrorOnEveryRankOrChangesNoBit) {
  plan::ModelBuilder builder = small_builder(DType::kBFloat16);
  builder.linear(0, "large", 20'000, DType::kBFloat16);
  const FakeModel model(builder);
  int failed = 0;
  for (unsigned seed = 1; seed <= seeds() && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    std::vector<std::string> told(kWorld);
    expect_no_errors(run_ranks(kWorld, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
      told[static_cast<std::size_t>(r)] = train(model, seed, r, collectives);
    }));
    EXPECT_EQ(told[0].empty(), told[1].empty()) << told[0] << "\n" << told[1];
    if (told[0].empty()) continue;
    ++failed;
    const auto drive = ::testing::HasSubstr("/drive/late");
    EXPECT_THAT(told, ::testing::Contains(drive));
    // A rank that fails while it brings values cannot notify the other in time: it leaves.
    EXPECT_THAT(told, ::testing::Each(::testing::AnyOf(drive, ::testing::HasSubstr("has left"))));
  }
  EXPECT_GT(failed, static_cast<int>(seeds() / 10));
  EXPECT_LT(failed, static_cast<int>(seeds()));
}

}  // namespace
}  // namespace strata::engine::fake

// How collectives of shard groups end: a rank that leaves, and a work that goes after a failure.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "comm/collective_network.h"
#include "comm/conformance_ranks.h"
#include "comm/grouped_ranks.h"

namespace strata::comm::conformance {
namespace {

TEST(GroupedEndings, ARankThatLeavesTellsEveryGroupWhy) {
  GroupedRanks ranks(6, 2);
  const auto errors = run_as_threads(
      6, [&](int rank) { return ranks.rank(rank); },
      [](Collectives& c) {
        try {
          c.barrier();
          if (c.rank() == 5) c.leave("ValueError: boom");
          c.barrier();
        } catch (const CommError& error) {
          return std::string(error.what());
        }
        return std::string("no error");
      });
  EXPECT_THAT(errors, testing::Each(testing::HasSubstr("rank 5 left: ValueError: boom")));
}

// A driver's error, of no class that this project has.
class BrokenWork final : public Work {
 public:
  bool done() override { return false; }
  void wait() override { throw std::runtime_error("an error of the driver"); }
};

class BrokenNetwork final : public CollectiveNetwork {
 public:
  using CollectiveNetwork::CollectiveNetwork;
  std::unique_ptr<Work> reduce_scatter(const Reduction&, std::string_view) override {
    return std::make_unique<BrokenWork>();
  }
};

TEST(GroupedEndings, AWorkThatGoesDropsErrorsOfEveryClass) {
  GroupedRanks ranks(4, 2);
  ranks.set_inside([](auto inside, RankNames names, const auto& /*device*/) {
    return std::make_unique<BrokenNetwork>(std::move(inside), names);
  });
  const auto results = run_as_threads(
      4, [&](int rank) { return ranks.rank(rank); },
      [](Collectives& c) {
        auto source = c.allocate("source", 8_B);
        float result = 0;
        auto work = c.reduce_scatter(
            {source.get(), 0_B, DType::kFloat32, std::span(&result, 1), 1.0F, false}, "one");
        EXPECT_THROW(work->wait(), std::runtime_error);
        work.reset();
        return std::string("went on");
      });
  EXPECT_THAT(results, testing::Each("went on"));
}

}  // namespace
}  // namespace strata::comm::conformance

#include "comm/collectives_conformance.h"
#include "comm/split_ranks.h"
#include "device/limited_device.h"
#include "strata/comm/combined/combined_collectives.h"
#include "strata/comm/host/host_collectives.h"

namespace strata::comm::conformance {
namespace {

std::vector<std::string> run_split(PeersCarry carry, int world_size,
                                   std::chrono::milliseconds timeout, const RankBody& body) {
  CommOptions options;
  options.timeout = timeout;
  LocalGroup group(world_size, options);
  return run_as_threads(
      world_size, [&](int rank) { return split_rank(group.rank(rank), carry, options); }, body);
}

Backend peers_gather() {
  return {"peers_gather",
          [](int world_size, std::chrono::milliseconds timeout, const RankBody& body) {
            return run_split(PeersCarry::kGathers, world_size, timeout, body);
          }};
}

Backend peers_reduce() {
  return {"peers_reduce",
          [](int world_size, std::chrono::milliseconds timeout, const RankBody& body) {
            return run_split(PeersCarry::kReductions, world_size, timeout, body);
          }};
}

INSTANTIATE_TEST_SUITE_P(Split, CollectivesMoveData,
                         testing::Values(peers_gather(), peers_reduce()));
INSTANTIATE_TEST_SUITE_P(Split, CollectivesReportErrors,
                         testing::Values(peers_gather(), peers_reduce()));
INSTANTIATE_TEST_SUITE_P(Split, OneSidedGathers, testing::Values(peers_gather()));

class SplitCollectivesTest : public testing::TestWithParam<PeersCarry> {
 protected:
  static std::vector<std::string> run(int world_size, const RankBody& body) {
    return run_split(GetParam(), world_size, std::chrono::seconds(60), body);
  }
  static std::vector<std::string> errors_on(int world_size,
                                            const std::function<void(Collectives&)>& body) {
    return run(world_size, [&](Collectives& c) {
      try {
        body(c);
      } catch (const CommError& error) {
        return std::string(error.what());
      }
      return std::string("no error");
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Both, SplitCollectivesTest,
                         testing::Values(PeersCarry::kGathers, PeersCarry::kReductions));

TEST_P(SplitCollectivesTest, PromiseWhatThePartsDo) {
  const bool peers_gather = GetParam() == PeersCarry::kGathers;
  const auto results = run(2, [&](Collectives& c) {
    require(c.name() == (peers_gather ? "peer/network" : "network/peer"), "name");
    require(c.traits().one_sided == peers_gather, "gathers");
    require(c.traits().deterministic != peers_gather && c.traits().sums_in_fp32 != peers_gather,
            "sums");
    require((c.stream(Traffic::kContributions) == nullptr) == peers_gather, "stream");
    require(c.traits().gathers_on_device, "exchange");
    c.barrier();
    return std::string();
  });
  EXPECT_THAT(results, testing::Each(""));
}

TEST_P(SplitCollectivesTest, NameARankThatGathersAndOneThatReduces) {
  if (GetParam() == PeersCarry::kGathers) return;  // a gather of peers is one-sided
  const auto errors = errors_on(2, [](Collectives& c) {
    auto buffer = c.allocate("layers", 64_B);
    std::vector<std::byte> flat(64);
    std::vector<float> result(8);
    if (c.rank() == 0) {
      c.all_gather({buffer.get(), 0_B, 0_B, 32_B}, flat, "layers.3")->wait();
    } else {
      c.reduce_scatter({buffer.get(), 0_B, DType::kFloat32, result, 1.0F, false}, "layers.4")
          ->wait();
    }
    c.barrier();
  });
  EXPECT_THAT(errors, testing::Each(testing::AllOf(testing::HasSubstr("all-gather of 'layers.3'"),
                                                   testing::HasSubstr("reduction of 'layers.4'"))));
}

TEST_P(SplitCollectivesTest, ExchangeOnTheDeviceBetweenGathersAndReductions) {
  const auto results = run(3, [](Collectives& c) {
    auto weights = c.allocate_growing("weights", 3000_B);
    weights->back(3000_B);
    auto gradients = c.allocate("gradients", Bytes(300 * 4 * 3));
    for (int round = 0; round < 5; ++round) {
      fill(weights->local(), c.rank(), round);
      c.barrier();
      std::vector<std::byte> flat(9000);
      auto gather = c.all_gather({weights.get(), 0_B, 0_B, 3000_B}, flat, "weights");
      for (float& x : floats_of(*gradients)) x = static_cast<float>(c.rank() + round);
      std::vector<float> result(300);
      auto reduce = c.reduce_scatter({gradients.get(), 0_B, DType::kFloat32, result, 1.0F, false},
                                     "gradients");
      reduce->wait();
      const std::byte mine[] = {pattern(c.rank(), 7, round)};
      std::vector<std::byte> all(3);
      c.all_gather_on_device(all, mine);
      for (int r = 0; r < 3; ++r) {
        const auto index = static_cast<std::size_t>(r);
        require(all[index] == pattern(r, 7, round), "exchange");
        require_pattern(std::span(flat).subspan(index * 3000, 3000), r, "gather", round);
      }
      for (const float x : result) require(x == static_cast<float>(3 + 3 * round), "sum");
    }
    c.barrier();
    return std::string();
  });
  EXPECT_THAT(results, testing::Each(""));
}

TEST_P(SplitCollectivesTest, AreProbedToTheSameFiguresOnEveryRank) {
  const auto results = run(2, [](Collectives& c) {
    device::CpuDevice device;
    const ProbeTimes times = probe(c, device, {DType::kBFloat16, DType::kFloat32});
    require(times.gather > 0.0 && times.reduce > 0.0, "times");
    return fmt::format("{} {}", times.gather, times.reduce);
  });
  EXPECT_EQ(results[0], results[1]);
  EXPECT_THAT(results[0], testing::Not(testing::HasSubstr("threw")));
}

TEST_P(SplitCollectivesTest, AreNotProbedWhereARankHasNoMemory) {
  const auto results = run(2, [](Collectives& c) {
    device::LimitedDevice device(c.rank() == 1 ? 1_MiB : 1_GiB);
    const ProbeTimes times = probe(c, device, {});
    c.barrier();
    return std::string(std::isinf(times.gather) && std::isinf(times.reduce) ? "" : "finite");
  });
  EXPECT_THAT(results, testing::Each(""));
}

}  // namespace
}  // namespace strata::comm::conformance

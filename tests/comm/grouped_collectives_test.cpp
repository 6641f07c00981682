#include "comm/collective_network.h"
#include "comm/collectives_conformance.h"
#include "comm/grouped_ranks.h"
#include "comm/late_ranks.h"
#include "strata/comm/combined/combined_collectives.h"

namespace strata::comm::conformance {
namespace {

// A single group is nothing else than its ranks.
std::vector<std::string> run_one_group(int world_size, std::chrono::milliseconds timeout,
                                       const RankBody& body) {
  CommOptions options;
  options.timeout = timeout;
  GroupedRanks ranks(world_size, world_size, options);
  return run_as_threads(
      world_size, [&](int rank) { return ranks.rank(rank); }, body);
}

Backend one_group() {
  return {"one_group", run_one_group};
}

INSTANTIATE_TEST_SUITE_P(OneGroup, CollectivesMoveData, testing::Values(one_group()));
INSTANTIATE_TEST_SUITE_P(OneGroup, CollectivesReportErrors, testing::Values(one_group()));
INSTANTIATE_TEST_SUITE_P(OneGroup, OneSidedGathers, testing::Values(one_group()));

// The parameter names the transport between replicas: memory that they read, a network, or peers on
// devices whose streams run late; those peers are the transport within groups, too.
class ShardGroupsTest : public testing::TestWithParam<const char*> {
 protected:
  static std::vector<std::string> run(int world_size, int group_size, const RankBody& body,
                                      Slices slices = Slices::kReplicated) {
    CommOptions options;
    options.timeout = std::chrono::seconds(60);
    GroupedRanks ranks(world_size, group_size, options, slices);
    if (GetParam() == std::string("network")) {
      ranks.set_network([](auto across, RankNames names, const auto& /*device*/) {
        return std::make_unique<CollectiveNetwork>(std::move(across), names);
      });
    }
    if (GetParam() == std::string("late_peers")) {
      join_by_peers(ranks, options.timeout);
      const auto make = [&](int rank) -> std::unique_ptr<Collectives> {
        const auto device = late_device(rank);
        return std::make_unique<HostResults>(ranks.rank(rank, device), device);
      };
      return run_as_threads(world_size, make, body);
    }
    return run_as_threads(
        world_size, [&](int rank) { return ranks.rank(rank); }, body);
  }

  static void on_ranks(int world_size, int group_size,
                       const std::function<void(Collectives&)>& body) {
    const auto results = run(world_size, group_size, [&](Collectives& c) {
      body(c);
      return std::string();
    });
    EXPECT_THAT(results, testing::Each("")) << world_size << " ranks in groups of " << group_size;
  }

  static void on_groups(const std::function<void(Collectives&)>& body) {
    for (const auto& [world, group] :
         std::vector<std::pair<int, int>>{{1, 1}, {2, 1}, {4, 2}, {6, 2}, {6, 3}, {3, 1}})
      on_ranks(world, group, body);
  }

  static std::vector<std::string> errors_on(int world_size, int group_size,
                                            const std::function<void(Collectives&)>& body) {
    return run(world_size, group_size, [&](Collectives& c) {
      try {
        body(c);
      } catch (const CommError& error) {
        return std::string(error.what());
      }
      return std::string("no error");
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Across, ShardGroupsTest,
                         testing::Values("memory", "network", "late_peers"));

// Inside the groups first, in their order.
float grouped_sum(const ShardPosition& place, std::size_t index, int round = 0) {
  float sum = 0.0F;
  for (int group = 0; group < place.groups; ++group) {
    float of_group = contribution(group * place.count, index, round);
    for (int i = 1; i < place.count; ++i)
      of_group += contribution(group * place.count + i, index, round);
    sum = group == 0 ? of_group : sum + of_group;
  }
  return sum;
}

void fill_contribution(Collectives& c, SharedBuffer& source, int round = 0) {
  const std::span<float> values = floats_of(source);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = contribution(c.rank(), i, round);
}

// Replicas hold the same bits.
void require_same_on_replicas(Collectives& c, std::span<const float> result) {
  const std::string mine(reinterpret_cast<const char*>(result.data()), result.size_bytes());
  const auto texts = c.all_gather_text(mine);
  for (std::size_t r = 0; r < texts.size(); ++r) {
    if (static_cast<int>(r) % c.shard_position().count != c.shard_position().index) continue;
    require_or_say(texts[r] == mine, [&] { return fmt::format("replica {} has other bits", r); });
  }
}

TEST_P(ShardGroupsTest, KnowTheirPlaces) {
  on_ranks(6, 2, [](Collectives& c) {
    const ShardPosition place = c.shard_position();
    require(place.count == 2 && place.groups == 3, "sizes");
    require(place.index == c.rank() % 2 && place.group == c.rank() / 2, "place");
    require(c.world_size() == 6, "world");
  });
}

TEST_P(ShardGroupsTest, GatherSlicesOfTheirGroup) {
  on_groups([](Collectives& c) {
    const ShardPosition place = c.shard_position();
    auto buffer = c.allocate("weights", 1000_B);
    fill(buffer->local(), c.rank());
    c.barrier();
    std::vector<std::byte> flat(1000 * static_cast<std::size_t>(place.count));
    c.all_gather({buffer.get(), 0_B, 0_B, 1000_B}, flat, "weights")->wait();
    for (int i = 0; i < place.count; ++i) {
      require_pattern(std::span(flat).subspan(static_cast<std::size_t>(i) * 1000, 1000),
                      place.group * place.count + i, "gather");
    }
    c.group_barrier();
  });
}

TEST_P(ShardGroupsTest, ReduceTheContributionsOfAllRanksToTheSameBits) {
  on_groups([](Collectives& c) {
    const ShardPosition place = c.shard_position();
    for (const std::size_t numel : {0UL, 1UL, 17UL, 1000UL}) {
      auto source = c.allocate("source", Bytes(numel * 4 * static_cast<std::size_t>(place.count)));
      for (const bool accumulate : {false, true}) {
        fill_contribution(c, *source);
        std::vector<float> result(numel, 3.0F);
        c.reduce_scatter({source.get(), 0_B, DType::kFloat32, result, 0.5F, accumulate}, "g")
            ->wait();
        for (std::size_t i = 0; i < numel; ++i) {
          const std::size_t at = static_cast<std::size_t>(place.index) * numel + i;
          const float wanted = 0.5F * grouped_sum(place, at) + (accumulate ? 3.0F : 0.0F);
          require_or_say(result[i] == wanted, [&] {
            return fmt::format("element {} of {}: {} not {}", i, numel, result[i], wanted);
          });
        }
        require_same_on_replicas(c, result);
      }
      c.barrier();
    }
  });
}

TEST_P(ShardGroupsTest, GoOnBesideEachOtherAndFreeTheirSourcesEarly) {
  on_groups([](Collectives& c) {
    constexpr std::size_t kNumel = 100;
    constexpr int kRounds = 20;
    const ShardPosition place = c.shard_position();
    auto source = c.allocate("source", Bytes(kNumel * 4 * static_cast<std::size_t>(place.count)));
    std::vector<std::vector<float>> results(kRounds, std::vector<float>(kNumel));
    std::vector<std::unique_ptr<Work>> works;
    for (int round = 0; round < kRounds; ++round) {
      fill_contribution(c, *source, round);
      works.push_back(c.reduce_scatter({source.get(), 0_B, DType::kFloat32,
                                        results[static_cast<std::size_t>(round)], 1.0F, false},
                                       fmt::format("unit {}", round)));
      if (c.rank() % 2 == 0) works.back()->done();
      works.back()->wait_for_readers();
    }
    for (auto& work : works) work->wait();
    for (int round = 0; round < kRounds; ++round) {
      const auto& result = results[static_cast<std::size_t>(round)];
      require(works[static_cast<std::size_t>(round)]->done(), "done after wait");
      for (std::size_t i = 0; i < kNumel; ++i) {
        const std::size_t at = static_cast<std::size_t>(place.index) * kNumel + i;
        require_or_say(result[i] == grouped_sum(place, at, round),
                       [&] { return fmt::format("round {} element {}", round, i); });
      }
    }
    c.barrier();
  });
}

TEST_P(ShardGroupsTest, AddUpOverGroupsOnceWhereThatIsPutOff) {
  on_groups([](Collectives& c) {
    constexpr std::size_t kNumel = 50;
    const ShardPosition place = c.shard_position();
    auto source = c.allocate("source", Bytes(kNumel * 4 * static_cast<std::size_t>(place.count)));
    std::vector<float> result(kNumel);
    Reduction reduction{source.get(), 0_B, DType::kFloat32, result, 1.0F, false};
    for (const int round : {0, 1, 2}) {
      // Whole numbers: every order of adding gives the same.
      for (float& x : floats_of(*source)) x = static_cast<float>(c.rank() + 1 + round);
      reduction.accumulate = round > 0;
      reduction.replicas = round < 2 ? Replicas::kLater : Replicas::kSumAll;
      c.reduce_scatter(reduction, "late")->wait();
    }
    const int world = c.world_size();
    const auto wanted = static_cast<float>(3 * (world * (world + 1) / 2) + 3 * world);
    for (const float x : result)
      require_or_say(x == wanted, [&] { return fmt::format("{} not {}", x, wanted); });
    require_same_on_replicas(c, result);
  });
}

// Each rank writes the slice that it owns, all see the whole.
void check_secondary_weights(Collectives& c) {
  constexpr std::size_t kBytes = 100;
  const ShardPosition place = c.shard_position();
  const std::size_t held = kBytes * static_cast<std::size_t>(place.parts);
  auto weights = c.allocate("weights", Bytes(7 + held));
  const auto own = static_cast<std::size_t>(place.index % place.parts) * kBytes;
  fill(weights->local().subspan(7 + own, kBytes), place.index);
  const SliceMap slices[] = {{weights.get(), 7_B, 0_B, Bytes(held)}};
  c.complete_slices(slices);
  c.group_barrier();
  std::vector<std::byte> flat(kBytes * static_cast<std::size_t>(place.count));
  c.all_gather(slices[0], flat, "weights")->wait();
  for (int i = 0; i < place.count; ++i) {
    require_pattern(std::span(flat).subspan(static_cast<std::size_t>(i) * kBytes, kBytes), i,
                    "part");
  }
  c.barrier();
}

TEST_P(ShardGroupsTest, OwnAPartOfWhatTheyHoldWhereSlicesAreSecondary) {
  constexpr std::size_t kNumel = 30;  // of an owned slice
  const RankBody body = [](Collectives& c) {
    const ShardPosition place = c.shard_position();
    require(place.count == c.world_size() && place.groups == 1, "every rank owns a slice");
    auto source = c.allocate("source", Bytes(kNumel * 4 * static_cast<std::size_t>(place.count)));
    std::vector<float> result(kNumel, 1.0F);
    fill_contribution(c, *source);
    c.reduce_scatter({source.get(), 0_B, DType::kFloat32, result, 1.0F, true}, "g")->wait();
    const ShardPosition sums{0, place.held_count(), 0, place.parts, 1};
    const auto at = static_cast<std::size_t>(place.index) * kNumel;
    for (std::size_t i = 0; i < kNumel; ++i) {
      require_or_say(result[i] == 1.0F + grouped_sum(sums, at + i),
                     [&] { return fmt::format("element {}", i); });
    }
    check_secondary_weights(c);
    return std::string();
  };
  for (const auto& [world, group] :
       std::vector<std::pair<int, int>>{{4, 2}, {6, 2}, {6, 3}, {2, 1}})
    EXPECT_THAT(run(world, group, body, Slices::kSecondary), testing::Each("")) << world;
}

TEST_P(ShardGroupsTest, SpeakForTheWholeWorldInEverythingSmall) {
  on_groups([](Collectives& c) {
    const int world = c.world_size();
    double values[] = {double(c.rank()), double(-c.rank())};
    c.all_reduce(values, ReduceOp::kSum);
    require(values[0] == world * (world - 1) / 2.0, "sum");
    values[0] = c.rank();
    c.all_reduce(values, ReduceOp::kMax);
    require(values[0] == world - 1, "maximum");
    for (int root = 0; root < world; ++root) {
      std::vector<std::byte> bytes(5000);
      if (c.rank() == root) fill(bytes, root);
      c.broadcast(bytes, root);
      require_pattern(bytes, root, "broadcast");
    }
    const auto text = [](int rank) {
      return std::string(static_cast<std::size_t>(rank) * 7, static_cast<char>('0' + rank));
    };
    const auto texts = c.all_gather_text(text(c.rank()));
    require(texts.size() == static_cast<std::size_t>(world), "number of texts");
    for (int r = 0; r < world; ++r) require(texts[static_cast<std::size_t>(r)] == text(r), "text");
    c.barrier();
  });
}

TEST_P(ShardGroupsTest, CompleteReductionsBeforeWhatComesAfterThem) {
  on_ranks(4, 2, [](Collectives& c) {
    auto source = c.allocate("source", 8_B);
    for (float& x : floats_of(*source)) x = 1.0F;
    float result = 0;
    auto work = c.reduce_scatter(
        {source.get(), 0_B, DType::kFloat32, std::span(&result, 1), 1.0F, false}, "one");
    c.barrier();
    require(work->done() && result == 4.0F, "sum");
  });
}

TEST_P(ShardGroupsTest, NameARankThatLeftByItsPlaceInTheWorld) {
  const auto errors = errors_on(6, 2, [](Collectives& c) {
    c.barrier();
    if (c.rank() != 3) c.barrier();
  });
  for (std::size_t r = 0; r < errors.size(); ++r) {
    if (r == 3) continue;
    EXPECT_THAT(errors[r], testing::HasSubstr("rank 3 has left")) << r;
  }
}

TEST_P(ShardGroupsTest, BringTheReasonOfAFailureToEveryRank) {
  const auto errors = errors_on(6, 2, [](Collectives& c) {
    c.barrier();
    if (c.rank() == 5) c.abort("the disk is full");
    c.barrier();
  });
  EXPECT_THAT(errors, testing::Each(testing::AllOf(testing::HasSubstr("rank 5"),
                                                   testing::HasSubstr("the disk is full"))));
}

TEST_P(ShardGroupsTest, NameGroupsThatReduceDifferentUnits) {
  const auto errors = errors_on(4, 2, [](Collectives& c) {
    auto source = c.allocate("source", 8_B);
    float result = 0;
    c.reduce_scatter({source.get(), 0_B, DType::kFloat32, std::span(&result, 1), 1.0F, false},
                     c.rank() < 2 ? "layers.3" : "layers.4")
        ->wait();
    c.barrier();
  });
  EXPECT_THAT(errors, testing::Each(testing::AllOf(testing::HasSubstr("layers.3"),
                                                   testing::HasSubstr("layers.4"))));
  EXPECT_THAT(errors, testing::Contains(testing::AnyOf(testing::HasSubstr("rank 2"),
                                                       testing::HasSubstr("rank 3"))));
}

TEST_P(ShardGroupsTest, KeepTheirError) {
  const auto results = run(4, 2, [](Collectives& c) {
    if (c.rank() == 1) c.abort("first reason");
    std::vector<std::string> messages;
    for (int i = 0; i < 3; ++i) {
      try {
        c.barrier();
        messages.emplace_back("no error");
      } catch (const CommError& error) {
        messages.emplace_back(error.what());
      }
    }
    require(messages[0] == messages[1] && messages[1] == messages[2], "the same error");
    return messages[2];
  });
  EXPECT_THAT(results, testing::Each(testing::HasSubstr("first reason")));
}

}  // namespace
}  // namespace strata::comm::conformance

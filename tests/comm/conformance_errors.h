// Conformance: every failure ends in a CommError that names ranks, on every rank, and never in a
// hang.
#pragma once

#include <algorithm>
#include <memory>

#include "comm/conformance_ranks.h"

namespace strata::comm::conformance {

class CollectivesReportErrors : public ConformanceTest {};

inline void reduce_once(Collectives& c, std::size_t numel, std::string_view tag) {
  auto source = c.allocate("source", Bytes(numel * 4 * static_cast<std::size_t>(c.world_size())));
  std::vector<float> result(numel);
  c.reduce_scatter({source.get(), 0_B, DType::kFloat32, result, 1.0F, false}, tag)->wait();
}

TEST_P(CollectivesReportErrors, NamesEachRanksTagWhenTheyDiffer) {
  const auto errors = errors_on_ranks(3, [](Collectives& c) {
    c.barrier();
    reduce_once(c, 64, c.rank() == 1 ? "layers.4" : "layers.3");
  });
  EXPECT_THAT(errors, testing::Each(testing::AllOf(testing::HasSubstr("layers.3"),
                                                   testing::HasSubstr("layers.4"),
                                                   testing::HasSubstr("rank 1"))));
}

TEST_P(CollectivesReportErrors, NamesEachRanksSizeWhenTheyDiffer) {
  const auto errors = errors_on_ranks(
      2, [](Collectives& c) { reduce_once(c, c.rank() == 0 ? 4096 : 4000, "layers.3"); });
  EXPECT_THAT(errors,
              testing::Each(testing::AllOf(testing::HasSubstr("4096"), testing::HasSubstr("4000"),
                                           testing::HasSubstr("layers.3"))));
}

TEST_P(CollectivesReportErrors, NamesEachRanksParcelsWhenTheyDiffer) {
  const auto errors = errors_on_ranks(2, [](Collectives& c) {
    const ShardPosition& place = c.shard_position();
    if (place.parts > 1 || place.groups > 1) throw CommError("parcels stay in a group");
    Parcels parcels(2);
    parcels.add(0, 1, 100_B);
    parcels.add(1, 0, c.rank() == 0 ? 50_B : 60_B);
    const auto source = c.allocate("source", 100_B);
    std::vector<std::byte> target(parcels.received(place.index).size());
    c.exchange({source.get(), target, &parcels}, "matrices")->wait();
  });
  EXPECT_THAT(errors, testing::Each(testing::AnyOf(
                          testing::HasSubstr("parcels stay in a group"),
                          testing::AllOf(testing::HasSubstr("150"), testing::HasSubstr("160"),
                                         testing::HasSubstr("matrices")))));
}

TEST_P(CollectivesReportErrors, NamesDifferentKindsOfOperation) {
  const auto errors = errors_on_ranks(2, [](Collectives& c) {
    if (c.rank() == 0) {
      reduce_once(c, 8, "layers.3");
    } else {
      c.barrier();
    }
  });
  EXPECT_THAT(errors, testing::Each(testing::AllOf(testing::HasSubstr("layers.3"),
                                                   testing::HasSubstr("barrier"))));
}

TEST_P(CollectivesReportErrors, AbortWakesPeersWithItsReason) {
  const auto errors = errors_on_ranks(3, [](Collectives& c) {
    c.barrier();
    if (c.rank() == 1) c.abort("the disk of rank one is full");
    c.barrier();
  });
  EXPECT_THAT(errors,
              testing::Each(testing::AllOf(testing::HasSubstr("rank 1"),
                                           testing::HasSubstr("disk of rank one is full"))));
}

// The rank that an exception ends says so, and its collectives go before its peers come.
TEST_P(CollectivesReportErrors, ARankThatLeavesTellsWhy) {
  const auto errors = errors_on_ranks(3, [](Collectives& c) {
    c.barrier();
    if (c.rank() == 1) c.leave("ValueError: the loss is not finite");
    c.barrier();
  });
  EXPECT_THAT(errors,
              testing::Each(testing::HasSubstr("rank 1 left: ValueError: the loss is not finite")));
}

TEST_P(CollectivesReportErrors, ARankThatLeavesAndGoesIsNotAStranger) {
  const auto errors = errors_on_ranks(3, [](Collectives& c) {
    c.barrier();
    if (c.rank() == 1) {
      c.leave("ValueError: the loss is not finite");
      return;
    }
    reduce_once(c, 64, "layers.3");
    c.barrier();
  });
  const auto told = testing::HasSubstr("rank 1 left: ValueError: the loss is not finite");
  EXPECT_THAT(errors[0], told);
  EXPECT_EQ(errors[1], "no error");
  EXPECT_THAT(errors[2], told);
}

// The error says that the rank in its last barrier has left, not that it mixes operations up.
TEST_P(CollectivesReportErrors, ARankWhoseProgramEndsIsSaidToHaveLeft) {
  const auto errors = errors_on_ranks(3, [](Collectives& c) {
    c.barrier();
    if (c.rank() == 1) {
      c.announce_departure("its program ended after step 2");
      c.barrier();
    } else {
      reduce_once(c, 64, "layers.3");
    }
  });
  EXPECT_THAT(errors, testing::Each(testing::AllOf(
                          testing::HasSubstr("rank 1 has left: its program ended after step 2"),
                          testing::HasSubstr("reduc"))));
}

TEST_P(CollectivesReportErrors, ProgramsThatEndTogetherSayNothing) {
  const auto errors = errors_on_ranks(3, [](Collectives& c) {
    if (c.rank() != 2) c.announce_departure(c.rank() == 0 ? "" : "its program ended");
    c.barrier();
    c.all_left();
  });
  EXPECT_THAT(errors, testing::Each("no error"));
}

TEST_P(CollectivesReportErrors, AbortFailsAReductionThatPeersWaitFor) {
  const auto errors = errors_on_ranks(3, [](Collectives& c) {
    c.barrier();
    if (c.rank() == 2) {
      c.abort("no memory");
      c.barrier();
    } else {
      reduce_once(c, 1000, "layers.0");
    }
  });
  EXPECT_THAT(errors, testing::Each(testing::HasSubstr("no memory")));
}

TEST_P(CollectivesReportErrors, ThrowsTheSameErrorAtEveryLaterCall) {
  const auto results = GetParam().run(2, std::chrono::seconds(60), [](Collectives& c) {
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

// Rank 1 asks and takes part in nothing, so nothing but the asking can tell it.
TEST_P(CollectivesReportErrors, ARankThatOnlyAsksHearsThatAPeerHasFailed) {
  const auto errors = errors_on_ranks(3, [](Collectives& c) {
    for (int i = 0; i < 3; ++i) c.require_usable();
    c.barrier();
    c.require_usable();
    if (c.rank() == 2) c.abort("the disk of rank two is full");
    if (c.rank() == 0) c.barrier();
    for (;;) c.require_usable();
  });
  EXPECT_THAT(errors,
              testing::Each(testing::AllOf(testing::HasSubstr("rank 2"),
                                           testing::HasSubstr("disk of rank two is full"))));
}

TEST_P(CollectivesReportErrors, AskingThrowsWhatEveryLaterCallThrows) {
  const auto results = GetParam().run(2, std::chrono::seconds(60), [](Collectives& c) {
    if (c.rank() == 1) c.abort("first reason");
    const auto message_of = [](const std::function<void()>& call) -> std::string {
      try {
        call();
      } catch (const CommError& error) {
        return error.what();
      }
      return "no error";
    };
    const std::string told = message_of([&] { c.barrier(); });
    require(message_of([&] { c.require_usable(); }) == told, "the error of the barrier");
    require(message_of([&] { c.barrier(); }) == told, "the same error");
    return told;
  });
  EXPECT_THAT(results, testing::Each(testing::HasSubstr("first reason")));
}

// Ranks between two steps call require_usable().
TEST_P(CollectivesReportErrors, AskingTakesPartInNothing) {
  on_ranks(2, [](Collectives& c) {
    for (int i = 0; i < 3 * (c.rank() + 1); ++i) c.require_usable();
    c.barrier();
    reduce_once(c, 64, "layers.3");
    if (c.rank() == 0) c.require_usable();
    c.barrier();
  });
}

TEST_P(CollectivesReportErrors, NamesARankThatLeft) {
  const auto errors = errors_on_ranks(3, [](Collectives& c) {
    c.barrier();
    if (c.rank() != 2) c.barrier();
  });
  EXPECT_THAT(errors[0], testing::HasSubstr("rank 2"));
  EXPECT_THAT(errors[1], testing::HasSubstr("rank 2"));
  EXPECT_EQ(errors[2], "no error");
}

TEST_P(CollectivesReportErrors, NamesARankThatDoesNotComeWithinTheTimeout) {
  const auto errors = errors_on_ranks(
      3,
      [](Collectives& c) {
        c.barrier();
        if (c.rank() != 1) {
          c.barrier();
        } else {
          // This rank lives, and takes no part until it learns that another rank has failed.
          for (;;) c.require_usable();
        }
      },
      std::chrono::milliseconds(1000));
  EXPECT_THAT(errors, testing::Each(testing::HasSubstr("rank 1")));
  EXPECT_THAT(errors, testing::Contains(testing::HasSubstr("barrier")));  // of the first to give up
}

TEST_P(CollectivesReportErrors, RefusesWrongArgumentsAndStaysUsable) {
  on_ranks(2, [](Collectives& c) {
    auto buffer = c.allocate("small", 100_B);
    std::vector<std::byte> flat(20);
    std::vector<float> result(50);
    const auto refused = [](const std::function<void()>& call) {
      try {
        call();
      } catch (const UsageError&) {
        return true;
      }
      return false;
    };
    require(refused([&] {
              c.all_gather({buffer.get(), 0_B, 0_B, 11_B}, flat, "x")->wait();
            }),
            "target of another size");
    require(!c.traits().one_sided || refused([&] {
      c.all_gather({nullptr, 0_B, 0_B, 10_B}, flat, "x")->wait();
    }),
            "no buffer");
    require(refused([&] {
              c.all_gather({buffer.get(), 95_B, 0_B, 10_B}, flat, "x")->wait();
            }),
            "slice outside the buffer");
    const auto reduce = [&](DType dtype) {
      c.reduce_scatter({buffer.get(), 0_B, dtype, result, 1.0F, false}, "x")->wait();
    };
    require(refused([&] { reduce(DType::kFloat32); }), "source too small");
    require(refused([&] { reduce(DType::kInt32); }), "integers");
    require(refused([&] { static_cast<void>(c.allocate("small", 8_B)); }), "name in use");
    require(refused([&] { c.broadcast(flat, 2); }), "no such root");
    if (c.traits().gathers_on_device) {
      std::vector<std::byte> much(Collectives::kOnDeviceMost + 1);
      std::vector<std::byte> all(2 * much.size());
      require(refused([&] { c.all_gather_on_device(all, much); }), "an exchange of much");
    }
    c.barrier();
    c.all_gather({buffer.get(), 0_B, 0_B, 10_B}, flat, "x")->wait();
    c.barrier();
  });
}

}  // namespace strata::comm::conformance

// Ranks join the chosen transports; one of them fails, or the other is faster.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "comm/collective_network.h"
#include "strata/base/error.h"
#include "strata/comm/combined/combined_collectives.h"
#include "strata/comm/host/host_collectives.h"

namespace strata::comm {
namespace {

using enum TransportKind;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// One rank, whose peers are called "local" and whose NCCL is called "network".
struct Fakes {
  Fakes() {
    makers.peers = [this] {
      made.emplace_back("peers");
      if (!peers_error.empty()) throw CommError(peers_error);
      return std::shared_ptr<Collectives>(LocalGroup(1).rank(0));
    };
    makers.nccl = [this]() -> std::shared_ptr<Collectives> {
      made.emplace_back("nccl");
      if (!nccl_error.empty()) throw CommError(nccl_error);
      return std::make_shared<conformance::CollectiveNetwork>(LocalGroup(1).rank(0));
    };
    makers.probe = [this](Collectives& of) {
      return of.name() == "network" ? probed.nccl : probed.peer;
    };
    makers.say = [this](bool warning, const std::string& text) {
      said.push_back((warning ? "warning: " : "") + text);
    };
  }
  std::string name_of_joined(BulkTransports wanted) {
    return std::string(join_transports(wanted, makers).collectives->name());
  }

  TransportFactories makers;
  ProbedTransports probed;
  std::string peers_error;
  std::string nccl_error;
  std::vector<std::string> made;
  std::vector<std::string> said;
};

TEST(CarrierJoin, MakesWhatIsWantedAndNothingElse) {
  Fakes both;
  EXPECT_EQ(both.name_of_joined({kPeer, kNccl}), "local/network");
  EXPECT_EQ(both.name_of_joined({kNccl, kPeer}), "network/local");
  Fakes peers;
  EXPECT_EQ(peers.name_of_joined({kAuto, kPeer}), "local");
  EXPECT_THAT(peers.made, ElementsAre("peers"));
  Fakes nccl;
  EXPECT_EQ(nccl.name_of_joined({kNccl, kNccl}), "network");
  EXPECT_THAT(nccl.made, ElementsAre("nccl"));
}

TEST(CarrierJoin, ProbesWhereNcclRunsAnyway) {
  Fakes fakes;
  fakes.makers.nccl_runs = true;
  fakes.probed = {{3.0, 3.0}, {2.5, 1.9}};
  const JoinedTransports joined = join_transports({kAuto, kAuto}, fakes.makers);
  EXPECT_EQ(joined.collectives->name(), "local/network");
  ASSERT_TRUE(joined.probe);
  EXPECT_EQ(joined.probe->nccl.reduce, 1.9);
  EXPECT_THAT(fakes.said, ElementsAre(AllOf(HasSubstr("gathers go over peer, reductions over nccl"),
                                            HasSubstr("nccl 2500.00 and 1900.00 ms"))));
  EXPECT_FALSE(join_transports({kPeer, kNccl}, fakes.makers).probe);
}

TEST(CarrierJoin, NcclMustBeFasterByFar) {
  const ProbedTransports probed{{3.0, 3.0}, {2.5, 1.9}};
  EXPECT_EQ(choose_faster({kAuto, kAuto}, probed), (BulkTransports{kPeer, kNccl}));
  EXPECT_EQ(choose_faster({kNccl, kAuto}, probed), (BulkTransports{kNccl, kNccl}));
  EXPECT_EQ(choose_faster({kAuto, kPeer}, probed), (BulkTransports{kPeer, kPeer}));
}

TEST(CarrierJoin, WhatCouldNotBeMeasuredIsNotChosen) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const ProbedTransports cases[] = {{{kNever, kNever}, {1.0, 1.0}},
                                    {{1.0, 1.0}, {kNever, kNever}},
                                    {{kNever, kNever}, {kNever, kNever}}};
  for (const ProbedTransports& probed : cases)
    EXPECT_EQ(choose_faster({kAuto, kAuto}, probed), (BulkTransports{kPeer, kPeer}));
}

TEST(CarrierJoin, TakesNcclWherePeersDoNotReachEachOther) {
  Fakes fakes;
  fakes.peers_error = "rank 1 cannot share memory";
  EXPECT_EQ(fakes.name_of_joined({kAuto, kAuto}), "network");
  EXPECT_THAT(fakes.said, ElementsAre("warning: weights and gradients go through NCCL, since the "
                                      "GPUs do not reach each other's memory: rank 1 cannot share "
                                      "memory"));
  EXPECT_THROW(join_transports({kAuto, kPeer}, fakes.makers), CommError);
  fakes.makers.nccl = nullptr;
  EXPECT_THROW(join_transports({kAuto, kAuto}, fakes.makers), CommError);
}

TEST(CarrierJoin, TheFailureOfNcclSaysWhyPeersWereNotTaken) {
  Fakes fakes;
  fakes.peers_error = "no handles to give";
  fakes.nccl_error = "NCCL did not start";
  try {
    join_transports({kAuto, kAuto}, fakes.makers);
    FAIL();
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("NCCL did not start"),
                                    HasSubstr("do not reach each other's memory"),
                                    HasSubstr("no handles to give")));
  }
}

}  // namespace
}  // namespace strata::comm

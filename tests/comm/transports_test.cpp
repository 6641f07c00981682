// The one choice of transports, as a table, and its promises.
#include "strata/comm/transports.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "strata/base/error.h"

namespace strata::comm {

void PrintTo(const TransportChoice& choice, std::ostream* out) {
  constexpr const char* kControls[] = {"none", "shared memory", "backend"};
  *out << kControls[static_cast<int>(choice.control)];
  if (choice.bulk)
    *out << ", " << name_of(choice.bulk->gather) << "/" << name_of(choice.bulk->reduce);
}

namespace {

using enum TransportKind;
using Kind = CollectivesKind;
using Control = TransportChoice::Control;
using testing::HasSubstr;

constexpr TransportChoice kAlone{};

TransportChoice memory() {
  return {Control::kSharedMemory, std::nullopt};
}
TransportChoice memory(TransportKind gather, TransportKind reduce) {
  return {Control::kSharedMemory, BulkTransports{gather, reduce}};
}
TransportChoice backend() {
  return {Control::kBackend, std::nullopt};
}
TransportChoice backend(TransportKind both) {
  return {Control::kBackend, BulkTransports{both, both}};
}

struct Case {
  TransportSettings settings;
  RankSet ranks;
  bool on_gpus;
  TransportChoice wanted;
};

TEST(Carriers, OfAShardGroup) {
  const RankSet host{4, true};
  const RankSet hosts{4, false};
  const Case cases[] = {
      {{}, {1, true}, false, kAlone},
      {{Kind::kPeer}, {1, true}, true, kAlone},
      // On the host, strata.collectives alone decides.
      {{}, host, false, memory()},
      {{}, hosts, false, backend()},
      {{Kind::kShm}, host, false, memory()},
      {{Kind::kShm}, hosts, false, memory()},
      {{Kind::kC10d}, host, false, backend()},
      {{Kind::kPeer}, host, false, memory(kPeer, kPeer)},
      // Between GPUs, bulk has a transport of its own beside the control plane.
      {{}, host, true, memory(kAuto, kAuto)},
      {{}, hosts, true, backend(kNccl)},
      {{Kind::kShm}, host, true, memory(kNccl, kNccl)},
      {{Kind::kC10d}, host, true, backend(kNccl)},
      {{Kind::kNccl}, host, true, memory(kNccl, kNccl)},
      {{Kind::kPeer}, host, true, memory(kPeer, kPeer)},
      // Unless gather or reduce are named.
      {{Kind::kPeer, kNccl, kAuto}, host, true, memory(kNccl, kPeer)},
      {{Kind::kNccl, kAuto, kPeer}, host, true, memory(kNccl, kPeer)},
      {{Kind::kAuto, kPeer, kAuto}, host, true, memory(kPeer, kAuto)},
      {{Kind::kAuto, kNccl, kNccl}, hosts, true, backend(kNccl)},
  };
  for (const Case& each : cases) {
    EXPECT_EQ(choose_inside(each.settings, each.ranks, each.on_gpus), each.wanted)
        << name_of(each.settings.collectives) << " on " << (each.on_gpus ? "GPUs" : "CPUs");
  }
}

TEST(Carriers, AcrossShardGroupsReachFurther) {
  const RankSet host{2, true};
  const RankSet hosts{2, false};
  const Case cases[] = {
      {{}, host, false, memory()},
      {{}, hosts, false, backend()},
      {{Kind::kShm}, host, false, memory()},
      {{Kind::kShm}, hosts, false, backend()},
      {{Kind::kPeer}, host, true, memory(kPeer, kPeer)},
      {{Kind::kPeer}, hosts, true, backend(kNccl)},
      {{Kind::kPeer}, hosts, false, backend()},
  };
  for (const Case& each : cases)
    EXPECT_EQ(choose_across(each.settings, each.ranks, each.on_gpus), each.wanted);
}

std::string refused(const TransportSettings& settings, const RankSet& ranks) {
  try {
    choose_inside(settings, ranks, true);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Carriers, PeersJoinRanksOfOneHost) {
  EXPECT_EQ(refused({Kind::kPeer}, {8, false}),
            "strata.collectives: 'peer' joins ranks of one host, and these are on several; write "
            "'auto'");
  EXPECT_EQ(refused({Kind::kAuto, kPeer, kAuto}, {8, false}),
            "strata.gather, strata.reduce: 'peer' joins ranks of one host, and these are on "
            "several; write 'nccl', or leave both out");
}

std::string refused_alone(const TransportSettings& settings, const RankFacts& facts) {
  try {
    require_possible(settings, facts);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Carriers, OneRankCanSayThatSettingsCannotBe) {
  const RankFacts cpu{2, 2, false, true, "cpu"};
  const RankFacts gpu{2, 2, true, true, "cuda:0"};
  const RankFacts gpu_without_nccl{2, 2, true, false, "cuda:0"};
  EXPECT_THAT(refused_alone({Kind::kLocal}, cpu), HasSubstr("'local' is for one rank"));
  EXPECT_THAT(refused_alone({Kind::kNccl}, cpu),
              HasSubstr("'nccl' joins GPUs, and the model trains on cpu"));
  EXPECT_THAT(refused_alone({Kind::kAuto, kPeer, kAuto}, cpu),
              HasSubstr("strata.gather: 'peer' is for GPUs"));
  EXPECT_THAT(refused_alone({}, gpu_without_nccl),
              HasSubstr("strata.device: 2 ranks on GPUs need NCCL"));
  EXPECT_THAT(refused_alone({Kind::kPeer, kAuto, kNccl}, gpu_without_nccl),
              HasSubstr("strata.reduce: this build of torch has no NCCL"));
  EXPECT_THAT(
      refused_alone({Kind::kAuto, kAuto, kPeer}, {4, 2, true, true, "cuda:0"}),
      HasSubstr("strata.reduce: for ranks that are one shard group; leave it out, since "
                "strata.collectives chooses for all groups. Found 'peer' and groups of 2 among 4"));
  EXPECT_EQ(refused_alone({Kind::kLocal}, {1, 1, false, true, "cpu"}), "no error");
  EXPECT_EQ(refused_alone({Kind::kPeer}, gpu_without_nccl), "no error");
  EXPECT_EQ(refused_alone({Kind::kAuto, kPeer, kNccl}, gpu), "no error");
}

TEST(Carriers, PromiseWhatTheirCollectivesDo) {
  EXPECT_EQ(traits_of(kAlone, 1, false), kHostMemoryTraits);
  EXPECT_EQ(traits_of(kAlone, 1, true), kOneDeviceTraits);
  EXPECT_EQ(traits_of(memory(), 4, false), among(kHostMemoryTraits, 0, 4));
  EXPECT_EQ(traits_of(backend(), 4, false), among(kBackendTraits, 0, 4));
  EXPECT_EQ(traits_of(backend(kNccl), 4, true), among(kBackendTraits, 0, 4));
  const Traits peers = among(kPeerTraits, 0, 4);
  EXPECT_EQ(traits_of(memory(kAuto, kPeer), 4, true), peers);
  EXPECT_EQ(traits_of(memory(kAuto, kNccl), 4, true),
            split_traits(peers, among(kBackendTraits, 0, 4)));
}

TEST(Traits, OfAPairGatherAsTheOneAndReduceAsTheOther) {
  const Traits mixed = split_traits(among(kPeerTraits, 1, 3), among(kBackendTraits, 1, 3));
  EXPECT_TRUE(mixed.one_sided && mixed.gathers_on_device);
  EXPECT_FALSE(mixed.deterministic || mixed.sums_in_fp32 || mixed.has_contribution_stream ||
               mixed.has_inbox);
  EXPECT_EQ(mixed.place, (ShardPosition{1, 3, 0, 1}));
}

TEST(Traits, OfGroupsAreThoseInsideWithSumsOfBoth) {
  const Traits inside = among(kPeerTraits, 1, 4);
  const Traits across = among(kBackendTraits, 2, 3);
  const Traits replicated = grouped_traits(inside, across, Slices::kReplicated);
  EXPECT_EQ(replicated.world_size, 12);
  EXPECT_EQ(replicated.place, (ShardPosition{1, 4, 2, 3, 1}));
  EXPECT_TRUE(replicated.one_sided && replicated.sums_in_fp32);
  EXPECT_FALSE(replicated.deterministic || replicated.gathers_on_device || replicated.has_inbox);
  EXPECT_EQ(grouped_traits(inside, across, Slices::kSecondary).place,
            (ShardPosition{1 * 3 + 2, 12, 0, 1, 3}));
}

}  // namespace
}  // namespace strata::comm

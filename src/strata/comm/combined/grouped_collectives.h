// Collectives of ranks in shard groups: things are sharded inside a group of consecutive ranks, and
// every group holds all of them. Made of two Collectives of each rank: `inside`, of its group, and
// `across`, of the ranks at the same place in all groups, its replicas. Past one host: fast links
// inside, the network across.
//
// A gather is one of `inside`. A reduction is a reduce-scatter inside, then a sum of this rank's
// slice over the replicas, in fp32, to the same bits on all of them: where replicas read each
// other's memory each adds up all slices itself, in the order of groups; else each adds up a part
// and the parts are gathered. It goes on beside what the rank does: each call that starts a
// reduction brings those before it one step further, so that the sums across run while later
// contributions are made, in one order on all ranks. Everything else goes through both, first
// inside: a sum of doubles is one of the groups' sums, texts come by rank.
//
// With secondary slices ranks hold the same, and own less: the replicas of a held slice own an
// equal part of it each. A reduction's sum over them is a second reduce-scatter, and
// complete_slices() gathers what the owners have made of their parts. Owned slices are numbered as
// they lie: those of a held slice, in the order of groups.
//
// Memory: fp32 copies of the slices that are on their way, twice one, or one for every group where
// replicas read each other's; allocated by `across`, uncharged, kept.
// Threads, ownership: collectives.h. Errors: collectives.h; a failure of either part ends both.
// `inside` and `across` name ranks in errors by CommOptions::names.
#pragma once

#include <memory>

#include "strata/comm/collectives.h"
#include "strata/comm/comm_options.h"
#include "strata/device/device.h"

namespace strata::comm {

// The members of each group: group g is ranks [g * size, (g + 1) * size).
struct ShardGroups {
  int size = 1;
  int count = 1;

  int index_of(int rank) const { return rank % size; }
  int group_of(int rank) const { return rank / size; }
  RankNames inside_of(int rank) const { return {group_of(rank) * size, 1}; }
  RankNames across_of(int rank) const { return {index_of(rank), size}; }
};

// `inside.rank()` is the rank's place in its group, `across.rank()` the group; neither is used
// otherwise afterwards. `device`: where slices lie.
std::unique_ptr<Collectives> make_grouped_collectives(std::shared_ptr<Collectives> inside,
                                                      std::shared_ptr<Collectives> across,
                                                      std::shared_ptr<device::Device> device,
                                                      Slices slices = Slices::kReplicated);

}  // namespace strata::comm

// Collectives that are made of other collectives. Threads, ownership, errors: collectives.h; a
// failure of one part ends all.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "strata/base/dtype.h"
#include "strata/comm/collectives.h"
#include "strata/comm/transports.h"
#include "strata/device/device.h"

namespace strata::comm {

// Collectives of one group of ranks of which one carries gathers and another one reductions: copy
// engines and NCCL, say, whichever is faster at each.
//
// At most one of the two is one-sided. It allocates the memory, since it reads no other; the other
// one carries any memory, and goes on by itself while this rank waits for a peer's buffer. A
// barrier is one of both. all_reduce, after which slices may change, goes through the gathers'
// collectives. An exchange on the device goes through the one that has it, and waits for gathers of
// the other. Both compare what ranks do over one control plane (agreement.h), so a rank that
// gathers while another reduces gets an error that names both, without one more sync point.

// Both are of the same ranks and share a control plane; the caller uses neither afterwards. The
// world must be one shard group.
std::unique_ptr<Collectives> make_split_collectives(std::shared_ptr<Collectives> gathers,
                                                    std::shared_ptr<Collectives> reductions);

// Collectives of ranks in shard groups: things are sharded inside a group of consecutive ranks, and
// every group holds all of them. Made of two Collectives of each rank: `inside`, of its group, and
// `across`, of its replicas, the ranks at the same place in all groups. Past one host: fast links
// inside, the network across.
//
// A gather is one of `inside`. A reduction is a reduce-scatter inside, then a sum of this rank's
// slice over the replicas, in fp32, to the same bits on all of them: where replicas read each
// other's memory each adds up all slices itself, in the order of groups; else each adds up a part
// and the parts are gathered. Each call that starts a reduction brings those before it one step
// further, so that sums across run while later contributions are made, in one order on all ranks.
// Everything else goes through both, first inside: a sum of doubles is one of the groups' sums,
// texts come by rank.
//
// With secondary slices ranks hold the same, and own less: the replicas of a held slice own an
// equal part of it each. A reduction's sum over them is a second reduce-scatter, and
// complete_slices() gathers the parts. Owned slices are numbered as they lie: those of a held
// slice, in the order of groups.
//
// Memory: fp32 copies of the slices on their way, twice one, or one for every group where replicas
// read each other's; allocated by `across`, uncharged, kept. `inside` and `across` name ranks in
// errors by CommOptions::names.

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

// Collectives whose gathers need the calls of all ranks, made from collectives whose gathers do not
// (Traits::one_sided): for slices in memory that no peer can read, or on a drive. A gather in place
// (SliceMap without a buffer) copies this rank's slice to memory that peers reach, waits for the
// others, and reads their slices. All other operations are those of the collectives underneath.
// For devices that do not run ahead: a gather is complete when all_gather() returns. Holds two
// slices of the largest size that was gathered in place. If ranks gather different things, the
// error names them.

// `inner` is not used otherwise afterwards; one shard group.
std::shared_ptr<Collectives> make_joint_gathers(std::shared_ptr<Collectives> inner,
                                                std::shared_ptr<device::Device> device,
                                                RankNames names = {});

// How fast collectives are between the ranks that there are: one gather and one reduction of
// kProbeBytes of weights, and of their gradients, a few times each, with nothing beside them.
// Threads, errors: collectives.h. Memory: three to five times kProbeBytes while it runs, uncharged.

inline constexpr Bytes kProbeBytes = 64_MiB;

// Seconds of the fastest round, on the slowest rank: the same on all. Infinite where some rank has
// no memory for it.
struct ProbeTimes {
  double gather = 0.0;
  double reduce = 0.0;
};

struct ProbedDTypes {
  DType weights = DType::kFloat32;
  DType reduce = DType::kFloat32;  // in which gradients are added up
};

// Collective. Gradients travel as the reducer would send them: in their own dtype if they are
// widened before they are added up, else as dtypes.reduce. `device`: where the model computes.
ProbeTimes probe(Collectives& collectives, device::Device& device, const ProbedDTypes& dtypes);

// Ways to make the collectives of one set of ranks. Each is collective, and throws CommError on
// every rank or on none.
struct TransportFactories {
  using Make = std::function<std::shared_ptr<Collectives>()>;
  Make peers;
  Make nccl;               // null: NCCL is not available; "auto" is peers then
  bool nccl_runs = false;  // on every rank: to probe it costs little
  std::function<ProbeTimes(Collectives&)> probe;
  // Tells the user of a choice, `warning` where it is not the usual one. Called on every rank.
  std::function<void(bool warning, const std::string& text)> say;
};

struct ProbedTransports {
  ProbeTimes peer;
  ProbeTimes nccl;
};

struct JoinedTransports {
  std::shared_ptr<Collectives> collectives;
  std::optional<ProbedTransports> probe;  // nothing: there was none
};

// Makes the collectives whose bulk data goes as transports.h has chosen: peers, NCCL, or one for
// gathers and the other for reductions. Where the choice is "auto", peers are taken as far as they
// reach each other's memory, and a probe compares NCCL with them where NCCL runs anyway.
// Collective. Threads: that of the rank. Errors: CommError, on every rank.
JoinedTransports join_transports(BulkTransports wanted, const TransportFactories& makers);

// Replaces "auto" in `wanted` by the faster transport. Times are the same on every rank. They are
// infinite if a rank had no memory to measure them.
BulkTransports choose_faster(BulkTransports wanted, const ProbedTransports& probed);

}  // namespace strata::comm

// The promises of collectives to their users, as plain values: of each kind alone, and of two that
// are combined. Collectives return them; the choice of transports (transports.h) and the forecast
// predict them by the same functions. Pure; any thread.
#pragma once

#include <cstdint>

namespace strata::comm {

// The position of this rank among the ranks over which a thing is sharded: its shard group.
struct ShardPosition {
  int index = 0;   // of this rank's slice
  int count = 1;   // slices of a thing, ranks of a group
  int group = 0;   // that this rank belongs to
  int groups = 1;  // each of them holds everything
  // Each of `parts` ranks holds the same `parts` neighbouring slices, and owns one of them. The
  // owner gets a slice's sum, and complete_slices() copies it to the others. Gathers read held
  // slices.
  int parts = 1;

  int held_index() const { return index / parts; }
  int held_count() const { return count / parts; }
  bool operator==(const ShardPosition&) const = default;
};

// Ranks of several shard groups hold the same slices. Each owns all of a slice, or a part of it
// (secondary shards).
enum class Slices : std::uint8_t { kReplicated, kSecondary };

struct Traits {
  int world_size = 1;
  ShardPosition place{};
  bool one_sided = true;           // a gather needs no other rank's call
  bool deterministic = true;       // sums run in the order of ranks: the same bits in every run
  bool sums_in_fp32 = true;        // contributions of 16 bits are widened before they are added up
  bool gathers_on_device = false;  // all_gather_on_device() may be called
  bool has_contribution_stream = false;  // stream(Traffic::kContributions) is not null
  bool has_inbox = false;                // make_inbox() gives one

  bool operator==(const Traits&) const = default;
};

// Traits of one kind of collectives.
inline constexpr Traits kHostMemoryTraits{};  // ranks pull from each other's memory
inline constexpr Traits kPeerTraits{
    .gathers_on_device = true, .has_contribution_stream = true, .has_inbox = true};
inline constexpr Traits kBackendTraits{// of a process group: gloo, NCCL
                                       .one_sided = false,
                                       .deterministic = false,
                                       .sums_in_fp32 = false};
inline constexpr Traits kOneDeviceTraits{.one_sided = false};  // no peer: copies on the device

// The same among `world_size` ranks that are one shard group.
constexpr Traits among(Traits alone, int rank, int world_size) {
  alone.world_size = world_size;
  alone.place = {rank, world_size, 0, 1};
  return alone;
}

// Two collectives of the same ranks: one carries gathers, the other one reductions.
inline Traits split_traits(const Traits& gathers, const Traits& reductions) {
  Traits traits = gathers;
  traits.deterministic = reductions.deterministic;
  traits.sums_in_fp32 = reductions.sums_in_fp32;
  traits.gathers_on_device = gathers.gathers_on_device || reductions.gathers_on_device;
  traits.has_contribution_stream = reductions.has_contribution_stream;
  traits.has_inbox = false;  // its memory would be that of one, its reductions those of the other
  return traits;
}

// Collectives of the ranks of a shard group, and of the replicas of a slice.
inline Traits grouped_traits(const Traits& inside, const Traits& across, Slices slices) {
  const int size = inside.world_size;
  const int replicas = across.world_size;
  Traits traits;
  traits.world_size = size * replicas;
  traits.place = slices == Slices::kReplicated
                     ? ShardPosition{inside.place.index, size, across.place.index, replicas, 1}
                     : ShardPosition{inside.place.index * replicas + across.place.index,
                                     size * replicas, 0, 1, replicas};
  traits.one_sided = inside.one_sided;
  traits.deterministic = inside.deterministic && across.deterministic;
  traits.sums_in_fp32 = inside.sums_in_fp32;  // what the replicas add up is fp32 by then
  return traits;
}

}  // namespace strata::comm

#include "strata/comm/traits.h"

namespace strata::comm {

Traits split_traits(const Traits& gathers, const Traits& reductions) {
  Traits traits = gathers;
  traits.deterministic = reductions.deterministic;
  traits.sums_in_fp32 = reductions.sums_in_fp32;
  traits.gathers_on_device = gathers.gathers_on_device || reductions.gathers_on_device;
  traits.has_contribution_stream = reductions.has_contribution_stream;
  traits.has_inbox = false;  // its memory would be that of one, its reductions those of the other
  return traits;
}

Traits grouped_traits(const Traits& inside, const Traits& across, Slices slices) {
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

// Ranks as threads in shard groups. Every rank has GroupedCollectives, made from two LocalGroups or
// from collectives that the caller makes of them on the rank's device.
#pragma once

#include <deque>
#include <functional>
#include <memory>

#include "strata/comm/combined/combined_collectives.h"
#include "strata/comm/host/host_collectives.h"
#include "strata/device/cpu_device.h"

namespace strata::comm::conformance {

class GroupedRanks {
 public:
  GroupedRanks(int world_size, int group_size, CommOptions options = {},
               Slices slices = Slices::kReplicated)
      : groups_{group_size, world_size / group_size}, slices_(slices) {
    for (int group = 0; group < groups_.count; ++group) {
      options.names = groups_.inside_of(group * groups_.size);
      inside_.emplace_back(groups_.size, options);
    }
    for (int index = 0; index < groups_.size; ++index) {
      options.names = groups_.across_of(index);
      across_.emplace_back(groups_.count, options);
    }
  }

  using Change = std::function<std::unique_ptr<Collectives>(
      std::unique_ptr<Collectives>, RankNames, const std::shared_ptr<device::Device>&)>;
  // set_network() wraps the collectives over replicas, set_inside() those within a group.
  void set_network(Change change) { network_ = std::move(change); }
  void set_inside(Change change) { within_ = std::move(change); }

  std::unique_ptr<Collectives> rank(
      int rank, std::shared_ptr<device::Device> device = std::make_shared<device::CpuDevice>()) {
    const int index = groups_.index_of(rank);
    const int group = groups_.group_of(rank);
    auto inside = inside_[static_cast<std::size_t>(group)].rank(index);
    if (within_) inside = within_(std::move(inside), groups_.inside_of(rank), device);
    auto across = across_[static_cast<std::size_t>(index)].rank(group);
    if (network_) across = network_(std::move(across), groups_.across_of(rank), device);
    return make_grouped_collectives(std::move(inside), std::move(across), std::move(device),
                                    slices_);
  }

 private:
  ShardGroups groups_;
  Slices slices_;
  std::deque<LocalGroup> inside_;
  std::deque<LocalGroup> across_;
  Change within_;
  Change network_;
};

}  // namespace strata::comm::conformance

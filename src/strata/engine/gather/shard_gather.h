// One gather of a sharded unit: every rank's shard, brought into a flat buffer. A shard in memory
// of the device is one that peers read, so it is a gather of the collectives alone. One that is
// offloaded is first copied to its place in the flat buffer, on a stream of its own, beside the
// model's work; the gather among ranks follows in place.
//
// Threads: one thread at a time; where anything is offloaded all ranks gather the same, in the same
// order. Ownership: borrows all; a Work may outlive the call, not this. Errors: CommError; IoError
// of a drive, which the other ranks learn of as a CommError that names this one.
#pragma once

#include <memory>
#include <span>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/unit/unit.h"
#include "strata/engine/unit/weight_shards.h"
#include "strata/offload/link_watch.h"

namespace strata::engine {

class ShardGather {
 public:
  // `watch` is told of what is copied.
  ShardGather(const WeightShards& shards, comm::Collectives& collectives, device::Device& device,
              offload::LinkWatch& watch)
      : shards_(shards), collectives_(collectives), device_(device), watch_(watch) {}

  // `flat`: of the unit's whole size; the compute stream has done with what lay there.
  std::unique_ptr<comm::Work> start(const Unit& unit, std::span<std::byte> flat);

 private:
  // To its place in the flat buffer.
  void upload(const Unit& unit, std::span<std::byte> own);

  const WeightShards& shards_;
  comm::Collectives& collectives_;
  device::Device& device_;
  offload::LinkWatch& watch_;
  std::unique_ptr<device::Stream> uploads_;  // null: none yet
};

}  // namespace strata::engine

// One gather of a sharded unit: copies every rank's shard into a flat buffer. Peers read shards in
// device memory, so for those the collectives alone gather. An offloaded shard is first copied to
// its offset in the flat buffer, on a stream of its own, beside the model's work; the gather among
// ranks follows in place.
//
// Threads: one thread at a time; if anything is offloaded, all ranks gather the same units in the
// same order. Ownership: borrows all; a Work may outlive the call, but not this object. Errors:
// CommError; IoError of a drive, which the other ranks get as a CommError that names this rank.
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
  // Notifies `watch` of its copies.
  ShardGather(const WeightShards& shards, comm::Collectives& collectives, device::Device& device,
              offload::LinkWatch& watch)
      : shards_(shards), collectives_(collectives), device_(device), watch_(watch) {}

  // `flat` has the unit's whole size; the compute stream no longer uses its old content.
  std::unique_ptr<comm::Work> start(const Unit& unit, std::span<std::byte> flat);

 private:
  // Copies the shard to its offset in the flat buffer.
  void upload(const Unit& unit, std::span<std::byte> own);

  const WeightShards& shards_;
  comm::Collectives& collectives_;
  device::Device& device_;
  offload::LinkWatch& watch_;
  std::unique_ptr<device::Stream> uploads_;  // null: none yet
};

}  // namespace strata::engine

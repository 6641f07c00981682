// Memory for units while they are gathered (memory::BufferPool).
//
// Where gathers are one-sided, a rank whose device is out of memory may gather less than others.
// Where they are collectives, all ranks have to gather the same. So whenever ranks make a buffer,
// they agree whether all of them got one: if one rank has no memory, take() fails on all. Ranks
// make buffers at the same points, since they give back and free the same ones. Several shard
// groups may gather different units and cannot agree; there a shortage is an error
// (may_do_without()).
//
// Threads: one thread at a time. Ownership: must outlive its leases. Errors: CommError from take()
// where it agrees.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/unit/unit.h"
#include "strata/engine/unit/weight_shards.h"
#include "strata/memory/buffer_pool.h"
#include "strata/memory/host_buffer.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

class GatherMemory {
 public:
  using Pool = memory::BufferPool<device::Memory>;

  GatherMemory(device::Device& device, comm::Collectives& collectives);

  // Free buffers are freed before they and the ones in use together exceed this.
  void set_total_limit(Bytes limit) { pool_.set_total_limit(limit); }
  // Frees the buffers that a repeated pass did not use.
  void end_round() { pool_.end_round(); }
  // Frees all unused buffers. Ranks that agree do so together.
  void trim() { pool_.trim(); }

  // `shortage` empty: `lease` has the memory. Otherwise this rank, or the rank that `shortage`
  // names if ranks agree, has no memory for it; unused buffers have been freed.
  struct Taken {
    Pool::Lease lease;
    std::string shortage;
  };
  Taken take(Bytes footprint);
  // Takes the buffer out of a lease, which gets another one. Null: there is no memory for that.
  std::shared_ptr<device::Memory> replace(Pool::Lease& lease);
  // Whether a rank may go on with less than take() was asked for.
  bool may_do_without() const { return ranks_ != Ranks::kCannotAgree; }

  // The memory of a gathered unit of `bytes`.
  static Bytes footprint(Bytes bytes) {
    return align_up(std::max(bytes, Bytes(1)), memory::page_size());
  }
  std::int64_t allocations() const { return pool_.allocations(); }

 private:
  // How the ranks that gather together ensure that they gather the same.
  enum class Ranks { kNeedNot, kAgree, kCannotAgree };
  static Ranks ranks_of(const comm::Collectives& collectives);

  Taken take_together(Bytes footprint);  // collective

  comm::Collectives& collectives_;
  Ranks ranks_;
  Pool pool_;
};

// Gathers every rank's shard of a unit into a flat buffer. The collectives alone gather shards in
// device memory. An offloaded shard is first copied to its offset in the flat buffer, on a stream
// of its own, beside the model's work; the gather among ranks follows in place.
//
// Threads: one thread at a time; if anything is offloaded, all ranks gather the same units in the
// same order. Ownership: borrows all; a Work may outlive the call, but not this object. Errors:
// CommError; IoError of a drive, which the other ranks get as a CommError that names this rank.
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

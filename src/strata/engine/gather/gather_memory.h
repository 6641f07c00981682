// Memory for units while they are gathered. Buffers of the same few sizes are taken and given back
// again and again, so a pass allocates nothing once it has seen all sizes.
//
// Where gathers are one-sided, a rank whose device is out of memory may gather less than others.
// Where gathers are collectives, all ranks have to gather the same. So whenever ranks have to make
// a buffer, they agree whether all of them got one: if one rank has no memory, take() fails on all.
// Ranks make buffers at the same points, since they give back and free the same ones. Several shard
// groups may gather different units, so their ranks cannot agree; there a shortage is an error
// (may_do_without()).
//
// Threads: one thread at a time. Ownership: a Lease may outlive this object. Errors: CommError from
// take() where it agrees.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/memory/buffer_pool.h"

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
  Taken take(Bytes bytes);
  // Takes the buffer out of a lease, which gets another one. Null: there is no memory for that.
  std::shared_ptr<device::Memory> replace(Pool::Lease& lease);
  // Whether a rank may go on with less than take() was asked for.
  bool may_do_without() const { return ranks_ != Ranks::kCannotAgree; }

  // The memory of a gathered unit of `bytes`.
  static Bytes footprint(Bytes bytes) { return Pool::footprint(bytes); }
  std::int64_t allocations() const { return pool_.allocations(); }

 private:
  // How the ranks that gather together ensure that they gather the same.
  enum class Ranks { kNeedNot, kAgree, kCannotAgree };
  static Ranks ranks_of(const comm::Collectives& collectives);

  Taken take_alone(Bytes bytes);
  Taken take_together(Bytes bytes);
  // Collective. The text of the first rank with a shortage.
  std::string shortage_of_any(const std::string& mine);

  comm::Collectives& collectives_;
  Ranks ranks_;
  Pool pool_;
};

}  // namespace strata::engine

// Memory for units while they are gathered: buffers that are taken and given back over and over in
// the same few sizes, so that a pass allocates nothing once it has seen them all.
//
// Where gathers are one-sided a rank whose device is out of memory may gather less than others.
// Where they are collectives all ranks have to gather the same: there ranks agree whether all of
// them got a buffer, whenever one has to be made, and a shortage of one rank is everybody's. Ranks
// make buffers at the same points, since they give back and free the same ones. (Over several
// shard groups, which may gather different things, nobody can be asked: a shortage is an error
// there, see may_do_without().)
//
// Threads: one thread at a time. Ownership: a Lease may outlive this object. Errors: CommError
// from take() where it agrees.
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

  // Buffers that are free go before they exceed this, together with those in use.
  void set_total_limit(Bytes limit) { pool_.set_total_limit(limit); }
  // Frees what a repeated pass had no use for.
  void end_round() { pool_.end_round(); }
  // Frees what nobody uses. Ranks that agree do so together.
  void trim() { pool_.trim(); }

  // `shortage` empty: the memory. Else there is none, on this rank or, where they agree, on the one
  // that it names; buffers that nobody uses have been freed.
  struct Taken {
    Pool::Lease lease;
    std::string shortage;
  };
  Taken take(Bytes bytes);
  // Takes the buffer out of a lease, which gets another one. Null: there is no memory for that.
  std::shared_ptr<device::Memory> replace(Pool::Lease& lease);
  // Whether a rank may go on with less than take() was asked for.
  bool may_do_without() const { return ranks_ != Ranks::kCannotAgree; }

  // What a unit of so many bytes takes.
  static Bytes footprint(Bytes bytes) { return Pool::footprint(bytes); }
  std::int64_t allocations() const { return pool_.allocations(); }

 private:
  // How the ranks that gather together come to gather the same.
  enum class Ranks { kNeedNot, kAgree, kCannotAgree };
  static Ranks ranks_of(const comm::Collectives& collectives);

  Taken take_alone(Bytes bytes);
  Taken take_together(Bytes bytes);
  // Collective. What the first rank with a shortage says.
  std::string shortage_of_any(const std::string& mine);

  comm::Collectives& collectives_;
  Ranks ranks_;
  Pool pool_;
};

}  // namespace strata::engine

// Access to the values of a model under the engine: parameters are gathered for who asks, and what
// one rank wrote becomes everybody's.
//
// Threads: one at a time, but for two ways in which another thread may read beside it. Values that
// are awaited are completed for any thread (complete()). A sharded parameter is gathered by read()
// for another thread only while no pass and no step runs (Scopes::read()).
// Ownership: borrows all. Errors: UsageError, CommError, OutOfMemoryError.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <thread>
#include <unordered_map>

#include "strata/engine/config/precision_config.h"
#include "strata/engine/engine.h"
#include "strata/torch/model/parameter_set.h"
#include "strata/torch/model/scopes.h"

namespace strata::torch {

class ValueAccess {
 public:
  // `precision`: what a parameter computes in whose values are of another dtype.
  ValueAccess(engine::Engine& engine, ParameterSet& parameters, Scopes& scopes,
              const engine::PrecisionConfig& precision);

  // Gathers the units of these parameters and keeps them until release(). Nests.
  void gather(std::span<const int> params);
  // `discard`: the last release() of a unit frees its memory, unless a scope uses it. What was
  // written to the gathered copies is lost, but for what publish() has made everybody's. Views
  // that were made since gather() keep their values and the memory, also while a graph is pending.
  void release(std::span<const int> params, bool discard);
  // Collective: what `root` holds now for these gathered parameters becomes everybody's value, also
  // in memory that the script gave them. UsageError on a rank whose parameter has another shape or
  // a dtype that the precision does not convert.
  void publish(std::span<const int> params, int root);
  // UsageError where a script gave a parameter other memory with other values than its unit has,
  // past publish(): training would neither see nor change it. It is given back its own then. That
  // the dtype alone is another one is said once, by rank 0. Cheap: some comparisons a parameter.
  void require_own_memory();
  // A parameter wanted outside any scope; false if it is there already.
  bool read(int param);
  bool gathered(int param) const;
  // Whether somebody else has a view of this released parameter's unit, or autograd saved of it.
  bool held_elsewhere(int param) const;
  // Gathers what was released though autograd saved of it, until the backward pass ends. Before
  // that begins. Collective where ranks gather together.
  void gather_what_was_saved();
  // A copy of this rank's part of a parameter, of one dimension; empty where it has none.
  at::Tensor local_part(int param) const;

  // A step begins in this thread, on its current stream.
  void note_step();
  // Makes the values of an awaited unit complete for the calling thread and its current stream, and
  // for the thread of the last step. Any thread. When it is not that thread, the unit's parameters
  // and all others are awaited no more: torch lets nobody turn a tensor to other memory while
  // another thread reads it.
  void complete(int unit);

 private:
  void tell_of_conversion();
  // Elements [begin, end) of a parameter, which this rank owns, into `target`, on its stream.
  void read_own(int param, Numel begin, Numel end, std::byte* target) const;
  std::vector<int> units_of(std::span<const int> params) const;
  void require_publishable(int param) const;

  engine::Engine& engine_;
  ParameterSet& parameters_;
  Scopes& scopes_;
  const engine::PrecisionConfig& precision_;
  struct Held {
    int times = 0;           // gather() without release()
    std::size_t others = 0;  // ParameterSet::others() at the first
  };
  // Whether all ranks have to gather the same.
  bool gathers_together() const;

  std::unordered_map<int, Held> held_;  // by unit
  bool told_of_conversion_ = false;
  // Units that were released though others held them, or, of ranks that gather together, may have
  // held them.
  std::set<int> saved_;
  struct Step {
    std::thread::id thread;
    c10::Stream stream;
  };
  std::mutex step_mutex_;
  std::optional<Step> step_;  // the last one; guarded by step_mutex_
};

}  // namespace strata::torch

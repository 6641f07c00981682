// Access to the values of a model under the engine: gathers parameters for callers, and publishes
// the values that one rank wrote to all ranks. Threads: one at a time, except for complete() (any
// thread) and read() (another one while no pass and no step runs: Scopes::read()).
// Ownership: borrows all. Errors: UsageError, CommError, OutOfMemoryError.
#pragma once

#include <c10/core/Stream.h>

#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <thread>
#include <unordered_map>
#include <utility>

#include "strata/engine/config/precision_config.h"
#include "strata/engine/engine.h"
#include "strata/torch/model/parameter_set.h"
#include "strata/torch/model/scopes.h"

namespace strata::torch {

// The elements [first, second) of a parameter that the shard with this index holds; 0 and 0: none.
std::pair<Numel, Numel> range_in_shard(const engine::Weights& weights, int param, int index);

// The offset in this rank's shard of an element that the shard holds of this parameter.
Numel offset_in_shard(engine::Engine& engine, int param, Numel element);

// Copies elements [begin, end) of a parameter, which this rank owns, to `target`; queued on the
// engine's compute stream.
void read_own(engine::Engine& engine, int param, Numel begin, Numel end, std::byte* target);

class ValueAccess {
 public:
  // `precision`: decides the dtype in which a parameter computes if its values have another dtype.
  ValueAccess(engine::Engine& engine, ParameterSet& parameters, Scopes& scopes,
              const engine::PrecisionConfig& precision);

  // Gathers the units of these parameters and keeps them until release(). Nests.
  void gather(std::span<const int> params);
  // `discard`: the last release() of a unit frees its memory, unless a scope uses it. Writes to the
  // gathered copies are lost unless publish() was called. Views made since gather() keep their
  // values and the memory, even while a graph is pending.
  void release(std::span<const int> params, bool discard);
  // Collective: gives every rank the values that `root` now holds for these gathered parameters,
  // including values in memory that the script gave them. UsageError on a rank whose parameter has
  // another shape, or a dtype that the precision does not convert.
  void publish(std::span<const int> params, int root);
  // UsageError if a script gave a parameter other memory, with other values, without publish():
  // training would neither see nor change it. The parameter then gets its own memory back. If only
  // the dtype differs, rank 0 logs it once. Warns if a script has written to a sharded parameter
  // outside of gather(), where the write is lost. Cheap: some comparisons per parameter.
  void require_own_memory();
  // Gathers a parameter that is read outside any scope; false if it is gathered already.
  bool read(int param);
  bool gathered(int param) const {
    return engine_.gatherer().gathered(engine_.weights().unit_of(param).id);
  }
  // Whether a script has a view of this released parameter's unit, or autograd has saved one.
  bool held_elsewhere(int param) const {
    return parameters_.held_elsewhere(engine_.weights().unit_of(param).id);
  }
  // Before a backward pass: gathers until its end the units that were released although autograd
  // had saved views of them. Collective if ranks gather together.
  void gather_what_was_saved();
  // A one-dimensional copy of this rank's part of a parameter; empty if it has none.
  at::Tensor local_part(int param) const;

  // A step begins in this thread, on its current stream.
  void note_step();
  // Completes the values of a pending unit for the calling thread, its current stream, and the
  // thread of the last step. If these threads differ, no parameter is pending from then on, because
  // torch does not let a thread point a tensor at other memory while another thread reads it.
  void complete(int unit);

 private:
  void tell_of_conversion();
  void look_for_lost_writes(const engine::Unit& unit);
  void warn_of_lost_write();
  void note_versions(int unit);
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
  std::vector<std::uint32_t> versions_;  // by parameter: torch counts writes in it
  int lost_write_ = -1;                  // a parameter whose write was lost; -1: none
  std::set<int> warned_of_;              // parameters
  // Units that were released although a script or autograd held them, or, if ranks gather together,
  // another rank may.
  std::set<int> saved_;
  struct Step {
    std::thread::id thread;
    c10::Stream stream;
  };
  std::mutex step_mutex_;
  std::optional<Step> step_;  // the last one; guarded by step_mutex_
};

}  // namespace strata::torch

// Scopes: a module's forward, and its backward, as the time in which its units must be gathered.
//
// Forward: enter() gathers, leave() releases. Backward: it begins, and the units are gathered
// again, when the first autograd node that made an output is about to run. It ends when the first
// node that made an input is about to run, since everything inside has run by then, or at the end
// of the backward pass. leave() adds hooks to these nodes, but no node to the graph, so inputs and
// outputs may be changed in place, and a scope entered twice has two backward lives.
//
// Where scopes are entered at all (needed()), the engine's recorder and torch's profiler get the
// beginning and the end of each.
//
// read() gathers a unit whose parameter a script reads while no scope holds it. It stays gathered
// until the micro-step ends (autograd may have saved it for several backward passes) or, under
// no_grad, until the next forward or step.
//
// Threads: one thread at a time. Another thread may call read() while no pass and no step runs, and
// is refused (UsageError) while one does: a pass gathers in an order that all ranks share.
// Ownership: hooks in graphs hold the tracker weakly; graphs that outlive the engine do nothing to
// it. Errors: those of Gatherer::acquire, thrown out of forward or backward. A call that ends
// something ends all of it even if a part fails, and then throws the first error.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strata/base/error.h"
#include "strata/engine/engine.h"

namespace strata::torch {

class Scopes : NonCopyable {
 public:
  struct Scope {
    std::string name;              // of its module
    std::vector<int> units;        // that its forward needs
    bool read_in_backward = true;  // false: its backward does without them
  };
  // `scopes`: by scope id. `on_outputs` receives the outputs of the outermost scopes.
  Scopes(engine::Engine& engine, std::vector<Scope> scopes,
         std::function<void(std::span<const at::Tensor>)> on_outputs = {});
  ~Scopes();

  // False if every unit of the scope is always complete and no scope has to be learned or reported;
  // then the forward may run without enter() and leave().
  bool needed(int scope) const;

  void enter(int scope);
  void leave(int scope, std::span<const at::Tensor> inputs, std::span<const at::Tensor> outputs);
  // In place of leave() if the forward threw, whose error is the cause: keeps its own (failure()).
  void abandon(int scope) noexcept;

  // Whether a graph that is still to run needs the unit: the backward of some forward has not run,
  // or may run again (retain_graph).
  bool pending(int unit) const;

  void read(int unit);
  // Ends the hold that read() has on this unit.
  void end_reads(int unit);
  // Ends the holds that read() took under no_grad. Called when a forward begins.
  void release_idle_reads();
  // Begins a backward pass, which lasts until end_backward().
  void begin_backward();
  // Ends every scope's backward that is still open, and the holds that read() took under no_grad.
  void end_backward();
  // end_backward(), then ends all holds of read().
  void end_micro_step();

  // The first error while a scope was abandoned. The engine cannot continue after one.
  FirstError& failure() { return failure_; }

  // This thread makes a step as long as the result lives; other threads cannot gather meanwhile.
  std::shared_ptr<void> claim();

 private:
  struct Tracker;
  FirstError failure_;
  std::function<void(std::span<const at::Tensor>)> on_outputs_;
  std::shared_ptr<Tracker> tracker_;
  bool gathers_ = false;  // some unit is not whole
};

}  // namespace strata::torch

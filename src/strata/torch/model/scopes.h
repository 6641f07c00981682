// Scopes: a module's forward, and its backward, as the time in which its units must be gathered.
//
// Forward: enter() gathers, leave() releases. Backward: leave() also adds a hook to the autograd
// nodes that made the outputs; when the first of them is about to run, the scope's backward begins
// and its units are gathered again. It ends when the first of the nodes that made the scope's
// inputs is about to run, since everything inside has run by then, or at the end of the backward
// pass. No node is added to the graph, so inputs and outputs may be changed in place, and a scope
// entered twice has two backward lives.
//
// Where scopes are entered at all (needed()), the engine's recorder and torch's profiler get the
// beginning and the end of each.
//
// Safety net: read() gathers a unit if a script reads its parameter while no scope holds it. It
// stays gathered until the micro-step ends (autograd may have saved it for several backward passes)
// or, under no_grad, until the next forward or step.
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

class Scopes {
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
  Scopes(const Scopes&) = delete;
  Scopes& operator=(const Scopes&) = delete;

  // False if every unit of the scope is always complete and no scope has to be learned or reported;
  // then the forward may run without enter() and leave().
  bool needed(int scope) const;

  void enter(int scope);
  void leave(int scope, std::span<const at::Tensor> inputs, std::span<const at::Tensor> outputs);
  // Called if the forward threw: only releases the scope's units. An error here is kept
  // (failure()), because the forward's error is the cause.
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

  // Marks another use of the engine by this thread, a step, during which other threads cannot
  // gather.
  class Claim {
   public:
    explicit Claim(Scopes& scopes);
    ~Claim();
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;

   private:
    Scopes& scopes_;
  };

 private:
  struct Tracker;
  FirstError failure_;
  std::function<void(std::span<const at::Tensor>)> on_outputs_;
  std::shared_ptr<Tracker> tracker_;
  bool gathers_ = false;  // some unit is not whole
};

}  // namespace strata::torch

// Scopes: a module's forward, and its backward, as the time in which its units must be gathered.
//
// Forward: enter() gathers, leave() lets go. Backward: leave() also hangs a hook on the autograd
// nodes that made the outputs; when the first of them is about to run, the scope's backward begins
// and its units are gathered again. It ends when the first of the nodes that made the scope's
// inputs is about to run, since everything inside has run by then, or at the end of the backward
// pass. No node is added to the graph, so inputs and outputs may be changed in place, and a scope
// entered twice has two backward lives.
//
// The engine's recorder and torch's profiler are told when each begins and ends, wherever the scope
// is entered at all (needed()).
//
// Safety net: read() gathers a unit whose parameter is wanted while no scope holds it. It stays
// gathered until the micro-step ends (autograd may have saved it for several backward passes) or,
// under no_grad, until the next forward or step.
//
// Threads: one thread at a time. Another thread may call read() while no pass and no step runs, and
// is refused (UsageError) while one does: a pass gathers in an order that all ranks share.
// Ownership: hooks in graphs hold the tracker weakly; graphs that outlive the engine do nothing to
// it. Errors: those of Gatherer::acquire, thrown out of forward or backward. A call that ends
// something ends all of it whatever fails, and throws the first error then.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strata/base/first_error.h"
#include "strata/engine/engine.h"

namespace strata::torch {

class Scopes {
 public:
  struct Scope {
    std::string name;              // of its module
    std::vector<int> units;        // that its forward needs
    bool read_in_backward = true;  // false: its backward does without them
  };
  // By scope id. `on_outputs` gets what scopes return that were entered within no other.
  Scopes(engine::Engine& engine, std::vector<Scope> scopes,
         std::function<void(std::span<const at::Tensor>)> on_outputs = {});
  ~Scopes();
  Scopes(const Scopes&) = delete;
  Scopes& operator=(const Scopes&) = delete;

  // False where every unit of the scope is always complete and nothing is to be learned or told:
  // the forward may run without enter() and leave().
  bool needed(int scope) const;

  void enter(int scope);
  void leave(int scope, std::span<const at::Tensor> inputs, std::span<const at::Tensor> outputs);
  // The forward threw: lets go, nothing else. What fails here is kept (failure()): the forward's
  // error is the cause.
  void abandon(int scope) noexcept;

  // Whether a graph that is still to be run needs the unit: of a forward whose backward has not
  // been, or may be again (retain_graph).
  bool pending(int unit) const;

  void read(int unit);
  // Lets go of what read() gathered of this unit.
  void end_reads(int unit);
  // Lets go of what read() gathered under no_grad. Called where a forward begins.
  void release_idle_reads();
  // A backward pass runs, until end_backward().
  void begin_backward();
  // Ends every scope's backward that is still open, and lets go of what read() gathered under
  // no_grad.
  void end_backward();
  // end_backward(), and lets go of all that read() gathered.
  void end_micro_step();

  // What failed while something was abandoned, after which nothing can go on.
  FirstError& failure() { return failure_; }

  // Something else that this thread does with the engine, in which others cannot gather: a step.
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

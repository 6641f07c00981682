// The way into autograd: AutogradPass finds the backward passes that a script starts, GradientHooks
// takes the gradients where autograd would store them. Threads, ownership, errors: at each class.
#pragma once

#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "strata/engine/engine.h"
#include "strata/torch/model/parameter_set.h"

namespace torch::autograd {
struct Node;
}

namespace strata::torch {

// The nodes that made the tensors, each once; with `bases` then also the nodes of their bases if
// the tensors are views. An in-place change of a view (such as the output of a linear layer)
// removes the view's own node from the graph, but not its base's.
std::vector<::torch::autograd::Node*> producers(std::span<const at::Tensor> tensors, bool bases);

// A hook of a node: gets the gradients of a node that is about to run, and returns those that it
// runs with.
class BeforeNode final : public ::torch::autograd::FunctionPreHook {
 public:
  using Gradients = std::vector<at::Tensor>;
  explicit BeforeNode(std::function<Gradients(const Gradients&)> action)
      : action_(std::move(action)) {}
  Gradients operator()(const Gradients& gradients) override { return action_(gradients); }

 private:
  std::function<Gradients(const Gradients&)> action_;
};

// Runs `action` when the node is about to run. `first`: before the actions that are already
// registered there, else after them.
void run_before(::torch::autograd::Node& node, bool first, std::function<void()> action);

// Finds the beginning and the end of a backward pass that the script starts by `loss.backward()`,
// without a call of the engine.
//
// The pass begins when the first of these runs: a node that made an output of a forward (expect()),
// the node of a scaled loss (scaled()), or the node that stores a parameter's gradient (begin()).
// It ends with the autograd pass in which it began, in autograd's final callback, or, if an error
// ended that one, when the next one begins or by settle(). Nested autograd passes belong to it:
// those of reentrant checkpoints, and of functions that differentiate in their own backward. An
// autograd pass that stores no gradient of the model (torch.autograd.grad) is no backward pass.
//
// While engine.backward() runs, which begins and ends the pass itself (drive()), this class finds
// nothing.
//
// Threads: one thread at a time, autograd's threads among them. Ownership: hooks in graphs hold it
// weakly; graphs that outlive it do nothing to it. Errors: those of the calls it makes, thrown out
// of backward.
class AutogradPass : NonCopyable {
 public:
  struct Calls {
    std::function<bool()> stores;  // whether the graph that runs stores our gradients
    std::function<void()> begin;
    std::function<void()> end;      // abandon() follows if it throws
    std::function<void()> abandon;  // throws nothing
  };
  explicit AutogradPass(Calls calls);

  void expect(std::span<const at::Tensor> outputs);
  // Returns `loss`, which must require a gradient, times `factor`. An autograd pass from there
  // counts as one of a loss scaled by `loss_scale` (scale_here()), for other models, too.
  at::Tensor scaled(const at::Tensor& loss, double factor, double loss_scale);
  // Called from within autograd: begins the pass unless it runs already.
  void begin();
  // Abandons a pass that an error has ended. Called before any other use of the engine.
  void settle();

  // drive(true) lasts until the same thread calls drive(false). Meanwhile every loss counts as
  // divided (divided()), for other models, too.
  void drive(bool driven);
  // Whether the graph that runs in this thread began at a loss that engine.backward() of any engine
  // has divided by its accumulation steps. Autograd carries this from thread to thread.
  static bool divided();
  // The loss scale by which an engine of this process has multiplied the loss at which that graph
  // began; nullopt: none has. Other engines, whose parameters the pass reaches, convert their
  // gradients to their own scale.
  static std::optional<double> scale_here();

 private:
  // One autograd pass. Its callback owns this object, and autograd destroys the callback however
  // the pass ends.
  struct Run {};
  void end(const Run& over);
  void abandon();

  Calls calls_;
  bool driven_ = false;
  bool open_ = false;
  std::weak_ptr<Run> run_;               // in which the open pass began
  std::shared_ptr<AutogradPass*> self_;  // hooks hold it weakly
  std::optional<at::impl::ThreadLocalPythonObjects> before_drive_;
};

// Takes gradients where autograd would store them. A pre-hook on each trainable parameter's
// AccumulateGrad node hands the gradient to the engine and gives autograd nothing, so autograd
// makes no `.grad`. Users' hooks see the same as in torch. Tensor hooks run before. For
// post-accumulate hooks `.grad` is this pass's gradient on this rank, divided and scaled as it will
// count; when they have run, the engine takes the tensor that they leave there. The first gradient
// of a backward pass begins the pass, unless it runs already (AutogradPass).
//
// Frozen parameters have a hook, too: FrozenParameters makes room for a gradient when one comes.
// For a parameter that requires gradients but is in no param group, autograd stores `.grad` as
// usual.
//
// Threads: the hooks run in autograd's threads, one at a time for one device. Ownership:
// keeps the AccumulateGrad nodes alive (a tensor holds its node weakly); the hooks hold the
// receiver weakly through a shared switch, and do nothing once this object is gone.
// A sparse gradient is made dense; a warning says so once in a process.
// Errors: UsageError, thrown out of backward, for frozen parameters that cannot be trained (tiles).
class GradientHooks : NonCopyable {
 public:
  // Parameters must be at their full shape (ParameterSet::bind).
  GradientHooks(engine::Engine& engine, const ParameterSet& parameters, AutogradPass& pass);
  ~GradientHooks();

  // Whether the graph that runs in this thread stores a gradient of a trainable parameter, as far
  // as autograd knows it beforehand.
  bool stored_by_running_graph() const;
  // Takes a gradient that autograd does not store: a tile's, from the operation that used it.
  void take(int param, const at::Tensor& gradient);
  // Used in place of take() for a tile: the operation writes its gradient into the tensor, which
  // has the parameter's shape, or adds it there (true), times the factor. end_take() follows.
  std::tuple<at::Tensor, bool, double> begin_take(int param);
  void end_take(int param);
  // begin_pass(): a pass begins, whose gradients are multiplied by `factor`. took(): it has brought
  // some. end_pass(), abandon_pass(): it has ended, or has failed.
  void begin_pass(double factor);
  bool took() const;
  void end_pass();
  void abandon_pass() noexcept;

 private:
  struct Receiver;
  class TakeLent;
  std::shared_ptr<Receiver> receiver_;
};

}  // namespace strata::torch

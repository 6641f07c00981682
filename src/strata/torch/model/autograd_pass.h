// Finds the beginning and the end of a backward pass that the script starts by `loss.backward()`,
// without a call of the engine.
//
// The pass begins when the first of these runs: a node that made an output of a forward (expect()),
// the node of a scaled loss (scaled()), or the node that stores a parameter's gradient (begin()).
// It ends with the autograd pass in which it began, in autograd's final callback. Nested autograd
// passes belong to it: those of reentrant checkpoints, and of functions that differentiate in their
// own backward. An autograd pass that stores no gradient of the model (torch.autograd.grad) is no
// backward pass.
//
// An error ends an autograd pass without a callback. The backward pass is then abandoned when the
// next one begins, or by settle().
//
// engine.backward() calls drive(), because it begins and ends the pass itself; this class then
// finds nothing.
//
// Threads: one thread at a time, autograd's threads among them. Ownership: hooks in graphs hold it
// weakly; graphs that outlive it do nothing to it. Errors: those of the calls it makes, thrown out
// of backward.
#pragma once

#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace strata::torch {

// producers() returns the nodes that made the tensors, each once. producers_of_bases() returns the
// nodes of their bases if the tensors are views: an in-place change of a view (such as the output
// of a linear layer) removes the view's own node from the graph, but not its base's.
std::vector<::torch::autograd::Node*> producers(std::span<const at::Tensor> tensors);
std::vector<::torch::autograd::Node*> producers_of_bases(std::span<const at::Tensor> tensors);

// Runs `action` when the node is about to run. `first`: before the actions that are already
// registered there, else after them.
void run_before(::torch::autograd::Node& node, bool first, std::function<void()> action);

class AutogradPass {
 public:
  struct Calls {
    std::function<bool()> stores;  // whether the graph that runs stores our gradients
    std::function<void()> begin;
    std::function<void()> end;      // abandon() follows if it throws
    std::function<void()> abandon;  // throws nothing
  };
  explicit AutogradPass(Calls calls);
  ~AutogradPass();
  AutogradPass(const AutogradPass&) = delete;
  AutogradPass& operator=(const AutogradPass&) = delete;

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
  // began; nullopt: the loss was not scaled. A pass may reach parameters of several engines, of
  // which only one has scaled the loss; the others convert their gradients to their own scale.
  static std::optional<double> scale_here();

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::optional<at::impl::ThreadLocalPythonObjects> before_drive_;
};

}  // namespace strata::torch

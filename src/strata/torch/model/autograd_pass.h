// Finds the beginning and the end of a backward pass that autograd alone runs: `loss.backward()`
// tells nobody.
//
// The pass begins when the first of these runs: a node that made an output of a forward (expect()),
// the node of a scaled loss (scaled()), or the node that stores a parameter's gradient (begin()).
// It ends with the run of the graph in which it began, in autograd's final callback. Runs inside
// that one belong to it: those of reentrant checkpoints, and of functions that differentiate in
// their own backward. A run that stores no gradient of the model (torch.autograd.grad) is no pass.
//
// An error ends a run without a callback. Such a pass is abandoned where the next one begins, or by
// settle().
//
// drive() is for whoever begins and ends passes himself (engine.backward()): all of that is left to
// him then.
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

// The nodes that made the tensors, each once; those of their bases where the tensors are views. A
// change in place of a view (of a linear layer's output, say) cuts the view's own node out of the
// graph; its base's stays.
std::vector<::torch::autograd::Node*> producers(std::span<const at::Tensor> tensors);
std::vector<::torch::autograd::Node*> producers_of_bases(std::span<const at::Tensor> tensors);

// `action` runs when the node is about to run; `first`: before what was to run there so far, else
// after that.
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
  // `loss`, which requires a gradient, times `factor`. What runs from there is of a loss that was
  // scaled by `loss_scale` (ScaledRun), for other models, too.
  at::Tensor scaled(const at::Tensor& loss, double factor, double loss_scale);
  // From within autograd: the pass begins unless it runs.
  void begin();
  // Abandons a pass that an error has ended. Called before anything else is done with the engine.
  void settle();

  // Until drive(false), by the same thread. Meanwhile every loss counts as divided (divided()), for
  // other models, too.
  void drive(bool driven);
  // Whether the graph that runs here comes from a loss that engine.backward() has divided by its
  // accumulation steps, of whatever engine. Carried by autograd from thread to thread.
  static bool divided();

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::optional<at::impl::ThreadLocalPythonObjects> before_drive_;
};

}  // namespace strata::torch

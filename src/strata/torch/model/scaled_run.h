// A run of autograd's graph that began at a loss times a loss scale. What it passes through may
// belong to several engines, of which only one has scaled the loss: the others learn the scale
// here, and bring their gradients to their own.
//
// A run is known by autograd's number of it, and by the thread that came upon the loss, for runs
// within it (reentrant checkpoints). Runs are of the process, as autograd's threads are, so they
// are kept in one list of the process. Threads: any. Ownership: an object is in the list for as
// long as it lives: give it to the run, whose end it must not outlive.
#pragma once

#include <optional>

namespace strata::torch {

class ScaledRun {
 public:
  // Of the graph that runs in this thread.
  explicit ScaledRun(double scale);
  ~ScaledRun();
  ScaledRun(const ScaledRun&) = delete;
  ScaledRun& operator=(const ScaledRun&) = delete;

  // The scale of the graph that runs in this thread; nullopt: its loss was not scaled.
  static std::optional<double> scale_here();
};

}  // namespace strata::torch

// An autograd pass that began at a loss times a loss scale. The pass may reach parameters of
// several engines, of which only one has scaled the loss. The others read the scale here, and
// convert their gradients to their own scale.
//
// A pass is identified by autograd's number for it. For passes within it (reentrant checkpoints),
// it is identified by the thread that reached the loss. Autograd's threads serve the whole process,
// so the process keeps one list of passes. Threads: any. Ownership: an object stands in the list as
// long as it lives; give it to the autograd pass, because it must not outlive that.
#pragma once

#include <optional>

namespace strata::torch {

class ScaledPass {
 public:
  // Marks the graph that runs in this thread.
  explicit ScaledPass(double scale);
  ~ScaledPass();
  ScaledPass(const ScaledPass&) = delete;
  ScaledPass& operator=(const ScaledPass&) = delete;

  // The scale of the graph that runs in this thread; nullopt: its loss was not scaled.
  static std::optional<double> scale_here();
};

}  // namespace strata::torch

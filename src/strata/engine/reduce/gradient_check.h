// The facts about a step's gradients that are needed before the update: whether ranks agree on the
// gradients that are there, the parameters for which no rank has a gradient, the global norm, and
// whether all gradients are finite.
//
// On a device that runs ahead, the host does not wait for the norm: the update reads its factor
// from the device's memory, and last_norm() and failed_late() report the outcome later.
//
// Facts that hosts know, such as the list of parameters without a gradient, travel in one exchange
// of texts in every step.
//
// A step whose gradients are not finite is skipped and counted. The first such step reports where
// they were found. Too many in a row (EngineOptions::max_skipped_steps) are an error.
//
// A rank that reads the gradients (read()) needs all other ranks, and some of them may not read. So
// it says in that exchange, to which each of them comes in any case, that it reads; they serve it.
//
// Threads: one thread at a time. Ownership: borrows all. Errors, on every rank: NumericsError for
// too many skipped steps; UsageError for parameters without a gradient where that is not allowed,
// and for ranks that dropped different gradients; the step's gradients are dropped. CommError.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/engine/reduce/gradient_norm.h"
#include "strata/engine/reduce/reducer.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/engine/unit/weights.h"

namespace strata::engine {

class GradientCheck {
 public:
  GradientCheck(Reducer& reducer, Weights& weights, comm::Collectives& collectives,
                device::Device& device, StepRecorder& recorder, const EngineOptions& options);

  struct Outcome {
    bool applies = true;         // false: the step is skipped
    std::optional<double> norm;  // nullopt: not computed yet, and so is whether the step applies
    // The factor of every gradient. If `late_factor` is not null, that device memory holds it.
    float factor = 1.0F;
    const float* late_factor = nullptr;
    std::function<float()> factor_on_host = {};  // GradientNorm's
  };
  // Collective, on the step's gradients. `allows_overflow`: gradients that are not finite are
  // expected, however often, and are not reported. `late`: the update can take a late factor.
  Outcome check(double loss_scale, bool allows_overflow, bool late);

  // Collective: brings the step's gradients together for this rank. The other ranks call it, too,
  // or check(), where they serve the reading ranks. A single rank needs only `unit`.
  void read(int unit, const WholeGradients::Take& take);

  // Both are the last step's, and wait for the device where it has not computed them yet.
  double last_norm() {
    look_at_norm();
    return last_finding_.norm;
  }
  bool last_applied() {
    look_at_norm();
    return applied_;
  }
  // The norm of the last step with a known norm; does not wait. 0 before the first.
  double known_norm() const { return last_finding_.norm; }
  // The skipped steps so far. `wait`: for the device; else the last step may be missing.
  std::int64_t skipped_steps(bool wait) {
    if (wait) look_at_norm();
    return skipped_;
  }
  // Takes the count of an earlier run, as if its last step had been applied.
  void set_skipped_steps(std::int64_t steps);
  // Whether the last step had a late factor and was skipped, and notify_late() was not called
  // since. Waits for the device as last_norm() does.
  bool failed_late() {
    look_at_norm();
    return notify_late_;
  }
  // Collective, on every rank for which failed_late(). Throws after too many skipped steps.
  void notify_late();
  // The message on skipped steps that no caller has taken yet; empty: none.
  std::string take_warning() { return std::exchange(warning_, {}); }

 private:
  using Finding = GradientNorm::Finding;
  std::vector<std::vector<int>> exchange(bool reads);
  void agree();
  void leave_out(std::vector<int> params);
  Finding measure(double loss_scale);
  bool skips(bool allows_overflow);
  void report_not_finite(bool late);
  [[noreturn]] void report_unused();
  [[noreturn]] void report_unlike_drops(std::size_t rank);
  void look_at_norm();

  Reducer& reducer_;
  Weights& weights_;
  comm::Collectives& collectives_;
  device::Device& device_;
  StepRecorder& recorder_;
  const EngineOptions& options_;
  GradientNorm norm_;
  WholeGradients whole_;
  Finding last_finding_;      // of the last step whose norm is known
  bool applied_ = true;       // that step
  bool notify_late_ = false;  // it was skipped, and notify_late() has yet to come
  std::int64_t skipped_ = 0;
  int in_a_row_ = 0;  // steps until now whose gradients were not finite, against expectation
  bool warned_ = false;
  std::string warning_;
};

}  // namespace strata::engine

// What a step has to know of its gradients before it updates the weights: that ranks agree on what
// is there, their global norm, whether all are finite.
//
// Where the device runs ahead the host does not wait for the norm: check() then gives a place in
// the device's memory from which the update reads its factor, and last_norm() and failed_late() say
// later what it was.
//
// Threads: one thread at a time. Ownership: borrows all. Errors, on every rank: NumericsError for
// gradients that are not finite, UsageError for parameters without one where that is not allowed;
// the step's gradients are dropped then. CommError.
#pragma once

#include <optional>
#include <string_view>
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
    bool finite = true;
    std::optional<double> norm;  // nullopt: not computed yet
    // What multiplies every gradient. `late_factor`, in memory of the device, counts where it is
    // not null.
    float factor = 1.0F;
    const float* late_factor = nullptr;
  };
  // Collective: of the step's gradients. `allows_overflow`: some that are not finite are no error.
  // `late`: the update can take a late factor.
  Outcome check(double loss_scale, bool allows_overflow, bool late);

  // Of the last step; waits for the device where it has not computed it yet.
  double last_norm();
  // Whether the last step's gradients were not finite, which nobody was told yet; waits likewise.
  bool failed_late();
  // Collective, on every rank for which failed_late(): says so.
  [[noreturn]] void report_late_failure();

 private:
  using Finding = GradientNorm::Finding;
  bool nothing_to_agree_on();
  Finding measure(double loss_scale);
  void reduce_late();
  std::vector<int> filled_units();
  int first_not_finite();
  [[noreturn]] void report_not_finite(int mine, std::string_view which);
  [[noreturn]] void report_unused();
  void look_at_norm();

  Reducer& reducer_;
  Weights& weights_;
  comm::Collectives& collectives_;
  device::Device& device_;
  StepRecorder& recorder_;
  const EngineOptions& options_;
  GradientNorm norm_;
  Finding last_finding_;     // of the last step whose norm is known
  bool tells_late_ = false;  // it was not finite, which nobody was told yet
};

}  // namespace strata::engine

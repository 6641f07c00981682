// What a step has to know of its gradients before it updates the weights: that ranks agree on what
// is there, which parameters no rank gave one, their global norm, whether all are finite.
//
// Where the device runs ahead the host does not wait for the norm: check() then gives a place in
// the device's memory from which the update reads its factor, and last_norm() and failed_late() say
// later what it was.
//
// Which parameters got no gradient is known to hosts: each rank's autograd has handed over those
// that it has. So it needs no device. It travels with the exchange that is there anyway: with the
// sums, as counts (PackedCounts), or, where the device has those, with the texts that say that no
// rank has anything else to agree on; those are empty unless something was missing.
//
// A step whose gradients are not finite is skipped and counted. The first one says where they were
// found. Too many in a row (EngineOptions::max_skipped_steps) are an error.
//
// A rank that wants to see the gradients (read()) needs all others, which may not want to. So it
// meets them in the exchange that each of them comes to in any case, says there that it reads, and
// they serve it. Where nobody reads that is one number more in the exchange.
//
// Threads: one thread at a time. Ownership: borrows all. Errors, on every rank: NumericsError for
// too many skipped steps, UsageError for parameters without a gradient where that is not allowed
// and for ranks that dropped different gradients; the step's gradients are dropped. CommError.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/engine/reduce/gradient_norm.h"
#include "strata/engine/reduce/packed_counts.h"
#include "strata/engine/reduce/reducer.h"
#include "strata/engine/reduce/whole_gradients.h"
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
    // What multiplies every gradient. `late_factor`, in memory of the device, counts where it is
    // not null.
    float factor = 1.0F;
    const float* late_factor = nullptr;
  };
  // Collective: of the step's gradients. `allows_overflow`: some that are not finite are expected,
  // however often, and nothing is said of them. `late`: the update can take a late factor.
  Outcome check(double loss_scale, bool allows_overflow, bool late);

  // Collective: brings the step's gradients together for this rank. The other ranks are here, too,
  // or in check(), where they serve those that read and then go on. Where there is no other rank
  // those of `unit` are enough.
  void read(int unit, bool allows_overflow, bool late, const WholeGradients::Take& take);

  // Both are the last step's, and wait for the device where it has not computed them yet.
  double last_norm();
  bool last_applied();
  // Of the last step whose norm is known; does not wait. 0 before the first.
  double known_norm() const { return last_finding_.norm; }
  // All steps so far. `wait`: for the device; else without the last one where that is not known.
  std::int64_t skipped_steps(bool wait);
  // Takes the count of an earlier run, as if its last step had been applied.
  void set_skipped_steps(std::int64_t steps);
  // Whether the last step had a late factor, was skipped, and tell_late() was not called since;
  // waits likewise.
  bool failed_late();
  // Collective, on every rank for which failed_late(). Throws where it was one too many.
  void tell_late();
  // The message on skipped steps that the user has not been told yet; empty: none.
  std::string take_warning() { return std::exchange(warning_, {}); }

 private:
  using Finding = GradientNorm::Finding;
  bool takes_texts(bool allows_overflow, bool late) const;
  bool agrees_in_texts();
  std::vector<double> totals(bool first, bool reads = false);
  void leave_out(std::vector<int> params);
  Finding measure(double loss_scale);
  std::vector<int> filled_units();
  int first_not_finite();
  bool skips(bool allows_overflow);
  void tell(bool late);
  [[noreturn]] void report_unused();
  [[noreturn]] void report_unlike_drops();
  void look_at_norm();

  Reducer& reducer_;
  Weights& weights_;
  comm::Collectives& collectives_;
  device::Device& device_;
  StepRecorder& recorder_;
  const EngineOptions& options_;
  GradientNorm norm_;
  WholeGradients whole_;
  PackedCounts counts_;      // by parameter: ranks that have a gradient of it
  Finding last_finding_;     // of the last step whose norm is known
  bool applied_ = true;      // that step
  bool tells_late_ = false;  // it was skipped, and tell_late() has yet to come
  std::int64_t skipped_ = 0;
  int in_a_row_ = 0;  // steps until now whose gradients were not finite, against expectation
  bool told_ = false;
  std::string warning_;
};

}  // namespace strata::engine

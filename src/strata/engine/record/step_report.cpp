#include "strata/engine/record/step_report.h"

#include "strata/engine/record/span_times.h"

namespace strata::engine {
namespace {

StepTransfers transfers(const StepRecord& record, Activity transfer, Activity wait, Bytes bytes,
                        int world_size) {
  StepTransfers result{covered(record, transfer), summed(record, wait), 0.0};
  const double part = static_cast<double>(world_size - 1) / world_size;
  if (result.seconds > 0.0)
    result.gb_per_s = static_cast<double>(bytes.value) * part / result.seconds * 1e-9;
  return result;
}

}  // namespace

StepReport make_step_report(const StepRecord& record, int world_size) {
  StepReport report{record.number, record.seconds, record.counts, std::nullopt, std::nullopt};
  if (!record.timed) return report;
  using enum Activity;
  StepTimes times;
  times.forward = summed(record, kForwardPass);
  times.backward = summed(record, kBackwardPass);
  times.update = summed(record, kUpdate);
  times.norm = summed(record, kNorm);
  times.optimizer = summed(record, kOptimizer);
  const StepCounts& counts = record.counts;
  times.gather = transfers(record, kGather, kGatherWait, counts.gathered, world_size);
  times.reduce = transfers(record, kReduce, kReduceWait, counts.reduced, world_size);
  times.refresh = transfers(record, kLazyGather, kLazyGatherWait, counts.refreshed, world_size);
  report.times = times;
  return report;
}

std::optional<StepReport> make_step_report(StepRecorder& recorder, bool wait, int world_size,
                                           Links* links) {
  recorder.resolve(wait);
  if (recorder.last() == nullptr) return std::nullopt;
  StepReport report = make_step_report(*recorder.last(), world_size);
  if (links != nullptr) report.links = links->report(*recorder.last(), wait);
  return report;
}

}  // namespace strata::engine

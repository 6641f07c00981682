#include "strata/engine/record/step_report.h"

#include <algorithm>
#include <utility>

namespace strata::engine {
namespace {

// Of the spans of one activity.
double sum(const StepRecord& record, Activity activity) {
  double seconds = 0.0;
  for (const StepSpan& span : record.spans) {
    if (span.activity == activity) seconds += span.end - span.begin;
  }
  return seconds;
}

// Of their union.
double covered(const StepRecord& record, Activity activity) {
  std::vector<std::pair<double, double>> spans;
  for (const StepSpan& span : record.spans) {
    if (span.activity == activity) spans.emplace_back(span.begin, span.end);
  }
  std::sort(spans.begin(), spans.end());
  double seconds = 0.0;
  double reached = spans.empty() ? 0.0 : spans.front().first;
  for (const auto& [begin, end] : spans) {
    seconds += std::max(0.0, end - std::max(begin, reached));
    reached = std::max(reached, end);
  }
  return seconds;
}

StepTransfers transfers(const StepRecord& record, Activity transfer, Activity wait, Bytes bytes,
                        int world_size) {
  StepTransfers result{covered(record, transfer), sum(record, wait), 0.0};
  const double part = static_cast<double>(world_size - 1) / world_size;
  if (result.seconds > 0.0)
    result.gb_per_s = static_cast<double>(bytes.value) * part / result.seconds * 1e-9;
  return result;
}

}  // namespace

StepReport make_step_report(const StepRecord& record, int world_size) {
  StepReport report{record.number, record.seconds, record.counts, std::nullopt};
  if (!record.timed) return report;
  using enum Activity;
  StepTimes times;
  times.forward = sum(record, kForwardPass);
  times.backward = sum(record, kBackwardPass);
  times.update = sum(record, kUpdate);
  times.norm = sum(record, kNorm);
  times.optimizer = sum(record, kOptimizer);
  const StepCounts& counts = record.counts;
  times.gather = transfers(record, kGather, kGatherWait, counts.gathered, world_size);
  times.reduce = transfers(record, kReduce, kReduceWait, counts.reduced, world_size);
  times.refresh = transfers(record, kRefresh, kRefreshWait, counts.refreshed, world_size);
  report.times = times;
  return report;
}

std::optional<StepReport> make_step_report(StepRecorder& recorder, bool wait, int world_size) {
  recorder.resolve(wait);
  if (recorder.last() == nullptr) return std::nullopt;
  return make_step_report(*recorder.last(), world_size);
}

}  // namespace strata::engine

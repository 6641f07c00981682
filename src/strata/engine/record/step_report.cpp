#include "strata/engine/record/step_report.h"

#include <algorithm>
#include <array>
#include <utility>

namespace strata::engine {
namespace {

using offload::Link;

// The sums over all spans of one activity in a step.
struct SpanTotals {
  double summed = 0.0;   // seconds, all added up
  double covered = 0.0;  // seconds in which at least one ran
  Bytes bytes;
};

SpanTotals totals_of(const StepRecord& record, Activity activity) {
  SpanTotals totals;
  std::vector<std::pair<double, double>> spans;
  for (const StepSpan& span : record.spans) {
    if (span.activity != activity) continue;
    totals.summed += span.end - span.begin;
    totals.bytes += span.bytes;
    spans.emplace_back(span.begin, span.end);
  }
  std::ranges::sort(spans);
  double reached = spans.empty() ? 0.0 : spans.front().first;
  for (const auto& [begin, end] : spans) {
    totals.covered += std::max(0.0, end - std::max(begin, reached));
    reached = std::max(reached, end);
  }
  return totals;
}

StepTransfers transfers(const StepRecord& record, Activity transfer, Activity wait, Bytes bytes,
                        int world_size) {
  StepTransfers result{totals_of(record, transfer).covered, totals_of(record, wait).summed, 0.0};
  const double part = static_cast<double>(world_size - 1) / world_size;
  if (result.seconds > 0.0)
    result.gb_per_s = static_cast<double>(bytes.value) * part / result.seconds * 1e-9;
  return result;
}

}  // namespace

std::string_view name_of(Activity activity) {
  constexpr std::array<std::string_view, kActivityCount> kNames{
      "forward pass", "backward pass", "update",      "forward",      "recompute",
      "backward",     "gather wait",   "reduce wait", "refresh wait", "copy wait",
      "norm",         "optimizer",     "gather",      "refresh",      "reduce",
      "peers ready",  "upload",        "download",    "drive read",   "drive write",
  };
  return kNames.at(static_cast<std::size_t>(activity));
}

LinkReport make_link_report(const StepRecord& record, bool copies, bool drives) {
  const StepCounts& counts = record.counts;
  LinkReport report;
  const auto add = [&](Link link, Bytes bytes, Activity activity, bool timed) {
    LinkUse& use = report.uses.emplace_back(LinkUse{.link = link, .bytes = bytes});
    if (!timed) return;
    const SpanTotals totals = totals_of(record, activity);
    use.seconds = totals.covered;
    if (totals.covered > 0.0)
      use.gb_per_s = static_cast<double>(totals.bytes.value) / totals.covered * 1e-9;
  };
  if (copies) {
    add(Link::kUp, counts.uploaded, Activity::kUpload, record.timed);
    add(Link::kDown, counts.downloaded, Activity::kDownload, record.timed);
    if (record.timed) report.copy_wait = totals_of(record, Activity::kCopyWait).summed;
  }
  if (drives) {
    add(Link::kRead, counts.stores.read, Activity::kDriveRead, true);
    add(Link::kWrite, counts.stores.written, Activity::kDriveWrite, true);
  }
  return report;
}

StepReport make_step_report(const StepRecord& record, int world_size) {
  StepReport report{record.number, record.seconds, record.counts, std::nullopt, std::nullopt};
  if (!record.timed) return report;
  using enum Activity;
  StepTimes& times = report.times.emplace();
  times.forward = totals_of(record, kForwardPass).summed;
  times.backward = totals_of(record, kBackwardPass).summed;
  times.update = totals_of(record, kUpdate).summed;
  times.norm = totals_of(record, kNorm).summed;
  times.optimizer = totals_of(record, kOptimizer).summed;
  const StepCounts& counts = record.counts;
  times.gather = transfers(record, kGather, kGatherWait, counts.gathered, world_size);
  times.reduce = transfers(record, kReduce, kReduceWait, counts.reduced, world_size);
  times.refresh = transfers(record, kLazyGather, kLazyGatherWait, counts.refreshed, world_size);
  return report;
}

}  // namespace strata::engine

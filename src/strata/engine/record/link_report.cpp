#include "strata/engine/record/link_report.h"

#include "strata/engine/record/span_times.h"

namespace strata::engine {
namespace {

using offload::Link;

LinkUse use_of(const StepRecord& record, Link link, Bytes bytes, Activity activity, bool timed) {
  LinkUse use{link, bytes, std::nullopt, std::nullopt, std::nullopt};
  if (!timed) return use;
  const double seconds = covered(record, activity);
  use.seconds = seconds;
  if (seconds > 0.0)
    use.gb_per_s = static_cast<double>(moved(record, activity).value) / seconds * 1e-9;
  return use;
}

}  // namespace

LinkReport make_link_report(const StepRecord& record, bool copies, bool drives) {
  const StepCounts& counts = record.counts;
  LinkReport report;
  const auto add = [&](Link link, Bytes bytes, Activity activity, bool timed) {
    report.uses.push_back(use_of(record, link, bytes, activity, timed));
  };
  if (copies) {
    add(Link::kUp, counts.uploaded, Activity::kUpload, record.timed);
    add(Link::kDown, counts.downloaded, Activity::kDownload, record.timed);
    if (record.timed) report.copy_wait = summed(record, Activity::kCopyWait);
  }
  if (drives) {
    add(Link::kRead, counts.stores.read, Activity::kDriveRead, true);
    add(Link::kWrite, counts.stores.written, Activity::kDriveWrite, true);
  }
  report.fetch_wait = counts.stores.seconds_waited;
  report.parts = counts.stores.parts;
  report.parts_ready = counts.stores.parts_ready;
  return report;
}

}  // namespace strata::engine

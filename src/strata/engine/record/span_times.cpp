#include "strata/engine/record/span_times.h"

#include <algorithm>
#include <utility>

namespace strata::engine {

double summed(const StepRecord& record, Activity activity) {
  double seconds = 0.0;
  for (const StepSpan& span : record.spans) {
    if (span.activity == activity) seconds += span.end - span.begin;
  }
  return seconds;
}

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

Bytes moved(const StepRecord& record, Activity activity) {
  Bytes bytes;
  for (const StepSpan& span : record.spans) {
    if (span.activity == activity) bytes += span.bytes;
  }
  return bytes;
}

}  // namespace strata::engine

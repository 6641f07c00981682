#include "strata/engine/record/step_trace.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "strata/io/folder_calls.h"
#include "strata/io/pending_range.h"

namespace strata::engine {
namespace {

using nlohmann::json;

constexpr std::array<std::string_view, 11> kTracks{
    "step",      "compute", "waits",     "gathers",     "reductions",  "reductions: peers",
    "optimizer", "uploads", "downloads", "drive reads", "drive writes"};
constexpr int kUploads = 7;  // from this track on, spans are of links
constexpr int kLanes = 100;  // the most lanes of a track; further spans go into the last one

// Its place in kTracks.
int track_of(Activity activity) {
  constexpr std::array<int, kActivityCount> kTrackOf{0, 0, 0, 1, 1, 1, 2, 2, 2, 2,
                                                     6, 6, 3, 3, 4, 5, 7, 8, 9, 10};
  return kTrackOf.at(static_cast<std::size_t>(activity));
}

// Places spans so that those of one lane lie within each other or apart, which is what viewers
// draw.
class Lanes {
 public:
  int place(double begin, double end) {
    for (std::size_t i = 0;; ++i) {
      if (i == open_.size()) open_.emplace_back();
      std::vector<double>& ends = open_[i];
      while (!ends.empty() && ends.back() <= begin) ends.pop_back();
      const bool last = i + 1 == kLanes;
      if (!last && !ends.empty() && ends.back() < end) continue;
      ends.push_back(end);
      return static_cast<int>(i);
    }
  }

 private:
  std::vector<std::vector<double>> open_;  // by lane: ends of the spans that are open, inmost last
};

struct TracedSpan {
  const StepSpan* what;
  std::int64_t step;
  double begin;  // seconds since the first record's epoch
  double end;
};

// The spans of all steps by their begin. If two begin at once the longer comes first: it contains
// the other. Steps have their own clocks, so a step's last span may seem to begin after the next
// step.
std::vector<TracedSpan> in_order(std::span<const StepRecord> records) {
  std::vector<TracedSpan> result;
  for (const StepRecord& record : records) {
    const double shift = record.epoch - records.front().epoch;
    for (const StepSpan& span : record.spans)
      // A drive's may have begun before all that is traced.
      result.push_back({&span, record.number, std::max(0.0, shift + span.begin),
                        std::max(0.0, shift + span.end)});
  }
  std::ranges::stable_sort(result, [](const TracedSpan& a, const TracedSpan& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
  });
  return result;
}

json arguments_of(const StepSpan& span, std::int64_t step, int world_size) {
  json arguments{{"what", name_of(span.activity)}, {"step", step}};
  if (span.bytes.value == 0) return arguments;
  arguments["bytes"] = span.bytes.value;
  const double seconds = span.end - span.begin;
  // The part of the other ranks in a unit crosses a link.
  const double part =
      track_of(span.activity) >= kUploads ? 1.0 : static_cast<double>(world_size - 1) / world_size;
  if (seconds > 0.0 && part > 0.0)
    arguments["GB/s"] = static_cast<double>(span.bytes.value) * part / seconds * 1e-9;
  return arguments;
}

json name_event(std::string_view what, int rank, int track, json arguments) {
  return {
      {"ph", "M"}, {"name", what}, {"pid", rank}, {"tid", track}, {"args", std::move(arguments)}};
}

// Gives viewers the names of the tracks and their order.
void describe_tracks(int rank, const std::vector<int>& tracks, json* events) {
  events->push_back(name_event("process_name", rank, 0, {{"name", fmt::format("rank {}", rank)}}));
  events->push_back(name_event("process_sort_index", rank, 0, {{"sort_index", rank}}));
  for (const int track : tracks) {
    std::string name(kTracks.at(static_cast<std::size_t>(track / kLanes)));
    if (track % kLanes > 0) name += fmt::format(" ({})", track % kLanes + 1);
    events->push_back(name_event("thread_name", rank, track, {{"name", std::move(name)}}));
    events->push_back(name_event("thread_sort_index", rank, track, {{"sort_index", track}}));
  }
}

}  // namespace

// {"rank", "epoch": of time zero, "events": with times in microseconds from there}
std::string trace_text_of(int rank, int world_size, std::span<const StepRecord> records,
                          const std::vector<std::string>& labels) {
  const double epoch = records.empty() ? 0.0 : records.front().epoch;
  std::array<Lanes, kTracks.size()> lanes;
  std::vector<int> tracks;
  json events = json::array();
  for (const TracedSpan& span : in_order(records)) {
    const Activity activity = span.what->activity;
    const int kind = track_of(activity);
    const int track =
        kind * kLanes + lanes.at(static_cast<std::size_t>(kind)).place(span.begin, span.end);
    if (std::ranges::find(tracks, track) == tracks.end()) tracks.push_back(track);
    const int label = span.what->label;
    const std::string_view name =
        label < 0 ? name_of(activity) : labels.at(static_cast<std::size_t>(label));
    events.push_back({{"ph", "X"},
                      {"name", name},
                      {"cat", name_of(activity)},
                      {"pid", rank},
                      {"tid", track},
                      {"ts", span.begin * 1e6},
                      {"dur", (span.end - span.begin) * 1e6},
                      {"args", arguments_of(*span.what, span.step, world_size)}});
  }
  describe_tracks(rank, tracks, &events);
  return json{{"rank", rank}, {"epoch", epoch}, {"events", std::move(events)}}.dump();
}

std::string chrome_trace(std::span<const std::string> texts) {
  std::vector<json> ranks;
  double first = std::numeric_limits<double>::max();
  for (const std::string& text : texts) {
    if (text.empty()) continue;
    ranks.push_back(json::parse(text));
    if (!ranks.back()["events"].empty())
      first = std::min(first, ranks.back()["epoch"].get<double>());
  }
  json events = json::array();
  for (json& rank : ranks) {
    const double shift = (rank["epoch"].get<double>() - first) * 1e6;
    for (json& event : rank["events"]) {
      if (event.contains("ts")) event["ts"] = event["ts"].get<double>() + shift;
      events.push_back(std::move(event));
    }
  }
  return json{{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}}.dump() + "\n";
}

void StepTrace::begin_step(StepRecorder& recorder) {
  if (!wants(recorder.next_step())) {
    recorder.begin_step(false);
    return;
  }
  recorder.set_listener([this](const StepRecord& record) {
    if (record.timed && wants(record.number)) records_.push_back(record);
  });
  recorder.begin_step(true);
}

void StepTrace::end_step(StepRecorder& recorder, comm::Collectives& collectives) {
  const bool last = wants(recorder.next_step()) && recorder.next_step() == last_;
  recorder.end_step();
  if (!last) return;
  recorder.resolve(true);
  recorder.set_listener({});
  const int rank = collectives.rank();
  std::string mine;
  if (rank < kRanks)
    mine = trace_text_of(rank, collectives.world_size(), records_, recorder.labels());
  const std::vector<std::string> texts = collectives.all_gather_text(mine);
  done_ = true;
  if (rank == 0) save(texts);
}

void StepTrace::end(StepRecorder& recorder, const comm::Collectives& collectives) noexcept {
  if (path_.empty() || done_) return;
  try {
    recorder.resolve(true);
  } catch (const std::exception&) {
    records_.clear();  // the device is lost
  }
  recorder.set_listener({});
  done_ = true;
  if (collectives.rank() != 0) return;
  try {
    if (records_.empty()) {
      problem_ = fmt::format("the run ended within step {}, the first of the timeline, or before",
                             kWarmUp + 1);
      return;
    }
    save({trace_text_of(0, collectives.world_size(), records_, recorder.labels())});
  } catch (const std::exception& error) {
    problem_ = error.what();
  }
}

void StepTrace::save(const std::vector<std::string>& ranks) noexcept {
  try {
    io::write_file_atomically(path_, chrome_trace(ranks));
  } catch (const std::exception& error) {
    problem_ = error.what();
  }
  records_.clear();
}

}  // namespace strata::engine

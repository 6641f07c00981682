// The timeline of some steps: a file in the JSON format that ui.perfetto.dev and chrome://tracing
// read. Each rank is a process, each kind of activity a track. A span has the name of its unit, and
// shows its activity, its bytes and GB/s, and its step. Spans of one kind that overlap get tracks
// side by side.
//
// After the last of its steps every rank gives its spans to rank 0, which writes one file for all
// ranks, or for the first kRanks. The clocks of the hosts align the ranks' times, at a moment when
// the device is idle: exact to some 10 microseconds on one host, and between hosts to the
// difference of their clocks.
//
// Threads: one at a time. Errors: none of files; problem() has the reason for a missing file.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/engine/record/step_recorder.h"

namespace strata::engine {

class StepTrace {
 public:
  static constexpr std::int64_t kWarmUp = 2;  // steps before the first that is traced
  static constexpr int kRanks = 16;           // the most ranks in the file

  // An empty `path` means no timeline.
  StepTrace(std::string path, int steps) : path_(std::move(path)), last_(kWarmUp + steps) {}

  // Called around each step; they tell the recorder which steps to time. The end of the last one
  // waits for the device, and is collective.
  void begin_step(StepRecorder& recorder);
  void end_step(StepRecorder& recorder, comm::Collectives& collectives);
  // For a run that ends before its last step: rank 0 writes the spans that it has, unless the file
  // is already written. Not a collective.
  void end(StepRecorder& recorder, const comm::Collectives& collectives) noexcept;

  const std::string& path() const { return path_; }
  bool over() const { return done_; }  // on rank 0: written, unless there is a problem()
  const std::string& problem() const { return problem_; }

 private:
  bool wants(std::int64_t step) const {
    return !path_.empty() && !done_ && step > kWarmUp && step <= last_;
  }
  void save(const std::vector<std::string>& ranks) noexcept;

  std::string path_;
  std::int64_t last_;
  std::vector<StepRecord> records_;
  bool done_ = false;
  std::string problem_;
};

// One rank's spans, as write() exchanges them, and the file made of all ranks' texts.
std::string trace_text_of(int rank, int world_size, std::span<const StepRecord> records,
                          const std::vector<std::string>& labels);
std::string chrome_trace(std::span<const std::string> texts);

}  // namespace strata::engine

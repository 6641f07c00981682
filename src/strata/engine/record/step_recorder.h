// Records training steps: counts always, transfers of drives with their times, and, if a step is
// timed, spans with their times. Times are those of the device: the recorder queues timed events
// beside the work, and reads them when the next step begins or at a query, so that the host never
// waits within a step. A step lasts from its first forward to the end of its update; work between
// steps is not recorded.
//
// If timing is off, a step records two events and a span tests one flag.
//
// Threads: spans (begin, end, measure) may be recorded by any thread; all else is the engine's, one
// thread at a time. Ownership: borrows the device and the collectives; a Recording may outlive its
// step, and one that is let go before its end is forgotten.
// Errors: DeviceError of a device that is lost.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/record/step_report.h"
#include "strata/engine/unit/unit.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

class StepRecorder final : public offload::LinkWatch {
 public:
  struct Open {
    StepSpan span;  // without times
    std::shared_ptr<device::TimedEvent> begin;
    std::shared_ptr<device::TimedEvent> end;  // null: not over
  };
  using Recording = std::shared_ptr<Open>;  // null: not recorded

  // A span's label is a number: the id of a unit, or a number of add_label().
  StepRecorder(device::Device& device, comm::Collectives& collectives, std::span<const Unit> units);

  int add_label(std::string name);
  const std::vector<std::string>& labels() const { return labels_; }

  // Steps that begin from now on are timed, or not.
  void set_timed(bool timed) { wants_times_ = timed; }
  // Called for every step as soon as its times are known.
  void set_listener(std::function<void(const StepRecord&)> listener) {
    listener_ = std::move(listener);
  }
  // `counts` returns the counts of all stores of this rank, since their construction.
  void set_store_counts(std::function<offload::StoreCounts()> counts) {
    store_counts_ = std::move(counts);
  }

  // --- steps ---
  // Does nothing within a step. `timed`: times this step even if set_timed() is off.
  void begin_step(bool timed);
  void end_step();
  std::int64_t next_step() const { return ended_ + 1; }
  // Ends the phase before it.
  void begin_phase(Activity phase);
  void end_phase();
  // The device has ended its work now: relates this rank's times to those of other ranks.
  void record_idle();

  // --- spans ---
  bool timing() const;  // within a step that is timed
  StepCounts& counts() { return counts_; }
  // The span begins here in `stream`, or in the present compute stream; it may end in another one.
  Recording begin(Activity activity, int label, Bytes bytes = {}, device::Stream* stream = nullptr);
  // The span ends here in that stream, unless its end is known already.
  void end(const Recording& recording, std::optional<int> label = std::nullopt,
           device::Stream* stream = nullptr);
  template <typename Call>
  void measure(Activity activity, int label, Call&& call) {
    const Recording recording = begin(activity, label);
    std::forward<Call>(call)();
    end(recording);
  }
  // Encloses the call that starts an operation of the collectives. The span then has the
  // operation's own times, or lasts until end().
  Recording begin_transfer(Activity activity, int label, Bytes bytes);
  void started(const Recording& recording, comm::Work& work);

  // --- links --- counted within steps; copies where host and device are apart
  void copy(offload::Link link, Bytes bytes, device::Stream& stream, const Call& queue) override;
  void await_copies(const Call& wait) override;
  void record_transfer(offload::Link link, Bytes bytes, const io::TransferTimes& times) override;

  // --- what was recorded ---
  // Reads the times of the steps that the device has finished; `wait`: of all ended steps.
  void resolve(bool wait);
  void keep_records() { kept_.emplace(); }  // from now on, of 64 steps at most, until take_kept()
  std::vector<StepRecord> take_kept() { return std::exchange(kept_.value(), {}); }
  // The last step with known times; null: none.
  const StepRecord* last() const { return last_ ? &*last_ : nullptr; }

 private:
  struct Step {
    StepRecord record;
    std::unique_ptr<device::TimedEvent> begin;
    std::unique_ptr<device::TimedEvent> end;
    std::unique_ptr<device::TimedEvent> idle;  // null: not noted
    double idle_epoch = 0.0;
    std::chrono::steady_clock::time_point host_begin;
    std::vector<Recording> open;
    std::vector<std::pair<StepSpan, io::TransferTimes>> transfers;  // of drives; without times
  };

  std::optional<StepRecord> take_finished(bool wait);
  // The mutex is held in all of these.
  Recording open_span(Activity activity, int label, Bytes bytes, device::Stream& stream);
  void close_span(const Recording& recording, device::Stream* stream = nullptr);
  offload::StoreCounts store_counts() const {
    return store_counts_ ? store_counts_() : offload::StoreCounts();
  }
  void add(Activity activity, int label, std::shared_ptr<device::TimedEvent> begin,
           std::shared_ptr<device::TimedEvent> end);
  static bool finished(Step& step, bool wait);
  static void read_times(Step& step);

  device::Device& device_;
  comm::Collectives& collectives_;
  mutable std::mutex mutex_;  // guards the spans of steps and whether they are timed
  std::function<void(const StepRecord&)> listener_;
  std::function<offload::StoreCounts()> store_counts_;
  std::vector<std::string> labels_;
  bool wants_times_ = false;
  bool in_step_ = false;
  bool timed_ = false;  // in a step that is
  std::int64_t ended_ = 0;
  std::int64_t charges_ = 0;     // when the step began
  std::int64_t waits_ = 0;       // when the step began
  offload::StoreCounts stores_;  // when the step began
  StepCounts counts_;
  Step step_;  // the one that runs
  Recording phase_;
  std::deque<Step> ended_steps_;  // whose times are not read
  std::optional<StepRecord> last_;
  std::optional<std::vector<StepRecord>> kept_;  // absent: none is kept
};

}  // namespace strata::engine

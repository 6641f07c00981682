#include "strata/engine/record/step_recorder.h"

#include <algorithm>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

double epoch_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

Activity wait_for(Activity transfer) {
  if (transfer == Activity::kGather) return Activity::kGatherWait;
  if (transfer == Activity::kReduce) return Activity::kReduceWait;
  STRATA_ASSERT(transfer == Activity::kLazyGather);
  return Activity::kLazyGatherWait;
}

}  // namespace

StepRecorder::StepRecorder(device::Device& device, comm::Collectives& collectives,
                           std::span<const Unit> units)
    : device_(device), collectives_(collectives) {
  for (const Unit& unit : units) labels_.push_back(unit.name());
}

int StepRecorder::add_label(std::string name) {
  labels_.push_back(std::move(name));
  return static_cast<int>(labels_.size()) - 1;
}

void StepRecorder::begin_step(bool timed) {
  if (in_step_) return;
  resolve(false);
  const std::lock_guard lock(mutex_);
  in_step_ = true;
  timed_ = timed || wants_times_;
  counts_ = {};
  charges_ = device_.ledger()->charges(memory::Tier::kDevice);
  waits_ = device_.host_waits()->count();
  stores_ = store_counts();
  step_ = {};
  step_.record.timed = timed_;
  step_.record.epoch = epoch_now();
  step_.host_begin = std::chrono::steady_clock::now();
  step_.begin = device_.compute_stream().record_timed();
}

void StepRecorder::end_step() {
  if (!in_step_) return;
  const std::lock_guard lock(mutex_);
  close_span(std::exchange(phase_, nullptr));
  step_.record.number = ++ended_;
  step_.record.counts = counts_;
  step_.record.counts.device_allocations =
      device_.ledger()->charges(memory::Tier::kDevice) - charges_;
  step_.record.counts.host_waits = device_.host_waits()->count() - waits_;
  step_.record.counts.stores = store_counts() - stores_;
  step_.end = device_.compute_stream().record_timed();
  ended_steps_.push_back(std::move(step_));
  step_ = {};
  if (timed_) collectives_.record_times(false);
  in_step_ = timed_ = false;
}

void StepRecorder::begin_phase(Activity phase) {
  const std::lock_guard lock(mutex_);
  if (phase_ != nullptr && phase_->span.activity == phase) return;
  close_span(std::exchange(phase_, nullptr));
  phase_ = open_span(phase, -1, Bytes(), device_.compute_stream());
}

void StepRecorder::end_phase() {
  const std::lock_guard lock(mutex_);
  close_span(std::exchange(phase_, nullptr));
}

bool StepRecorder::timing() const {
  const std::lock_guard lock(mutex_);
  return timed_;
}

void StepRecorder::record_idle() {
  const std::lock_guard lock(mutex_);
  if (!timed_) return;
  step_.idle = device_.compute_stream().record_timed();
  step_.idle_epoch = epoch_now();
}

StepRecorder::Recording StepRecorder::begin(Activity activity, int label, Bytes bytes,
                                            device::Stream* stream) {
  const std::lock_guard lock(mutex_);
  return open_span(activity, label, bytes, stream ? *stream : device_.compute_stream());
}

StepRecorder::Recording StepRecorder::open_span(Activity activity, int label, Bytes bytes,
                                                device::Stream& stream) {
  if (!timed_) return nullptr;
  return step_.open.emplace_back(
      std::make_shared<Open>(Open{{activity, label, bytes}, stream.record_timed(), nullptr}));
}

void StepRecorder::close_span(const Recording& recording, device::Stream* stream) {
  if (recording == nullptr || recording->end != nullptr) return;
  recording->end = (stream ? *stream : device_.compute_stream()).record_timed();
}

void StepRecorder::end(const Recording& recording, std::optional<int> label,
                       device::Stream* stream) {
  if (recording == nullptr) return;
  const std::lock_guard lock(mutex_);
  if (label) recording->span.label = *label;
  close_span(recording, stream);
}

StepRecorder::Recording StepRecorder::begin_transfer(Activity activity, int label, Bytes bytes) {
  const std::lock_guard lock(mutex_);
  // At each, since several engines may share the collectives.
  if (timed_) collectives_.record_times(true);
  return open_span(activity, label, bytes, device_.compute_stream());
}

void StepRecorder::started(const Recording& recording, comm::Work& work) {
  if (recording == nullptr) return;
  const std::lock_guard lock(mutex_);
  if (!device_.runs_ahead()) {  // the call itself was waited for
    add(wait_for(recording->span.activity), recording->span.label, recording->begin,
        device_.compute_stream().record_timed());
  }
  const comm::WorkTimes times = work.times();
  if (times.begin == nullptr || times.end == nullptr) {
    if (work.done()) close_span(recording);  // the call did it all
    return;
  }
  recording->begin = times.begin;
  recording->end = times.end;
  if (times.ready != nullptr)
    add(Activity::kPeersReady, recording->span.label, times.ready, times.begin);
}

// Where host and device are one nothing is copied between them.
void StepRecorder::copy(offload::Link link, Bytes bytes, device::Stream& stream,
                        const Call& queue) {
  if (!device_.runs_ahead() || bytes == Bytes()) return queue();
  const bool up = link == offload::Link::kUp;
  (up ? counts_.uploaded : counts_.downloaded) += bytes;
  Recording recording;
  {
    const std::lock_guard lock(mutex_);
    recording = open_span(up ? Activity::kUpload : Activity::kDownload, -1, bytes, stream);
  }
  queue();
  if (recording == nullptr) return;
  const std::lock_guard lock(mutex_);
  recording->end = stream.record_timed();
}

void StepRecorder::await_copies(const Call& wait) {
  if (!device_.runs_ahead()) return wait();
  measure(Activity::kCopyWait, -1, wait);
}

void StepRecorder::record_transfer(offload::Link link, Bytes bytes,
                                   const io::TransferTimes& times) {
  const std::lock_guard lock(mutex_);
  if (!in_step_) return;
  const bool read = link == offload::Link::kRead;
  step_.transfers.push_back(
      {{read ? Activity::kDriveRead : Activity::kDriveWrite, -1, bytes}, times});
}

void StepRecorder::add(Activity activity, int label, std::shared_ptr<device::TimedEvent> begin,
                       std::shared_ptr<device::TimedEvent> end) {
  step_.open.push_back(
      std::make_shared<Open>(Open{{activity, label, Bytes()}, std::move(begin), std::move(end)}));
}

void StepRecorder::resolve(bool wait) {
  while (std::optional<StepRecord> record = take_finished(wait)) {
    last_ = std::move(record);
    if (listener_) listener_(*last_);
    if (kept_ && kept_->size() < 64) kept_->push_back(*last_);
  }
}

// The oldest step that is over, with its times; nullopt: there is none.
std::optional<StepRecord> StepRecorder::take_finished(bool wait) {
  const std::lock_guard lock(mutex_);
  if (ended_steps_.empty() || !finished(ended_steps_.front(), wait)) return std::nullopt;
  Step step = std::move(ended_steps_.front());
  ended_steps_.pop_front();
  read_times(step);
  return std::move(step.record);
}

// Whether every time is known. Drops spans that were never ended, and, if `wait`, spans that have
// no end yet.
bool StepRecorder::finished(Step& step, bool wait) {
  const auto over = [wait](device::TimedEvent& event) {
    if (wait) event.wait();
    return event.done();
  };
  if (!over(*step.end)) return false;
  std::erase_if(step.open, [wait](const Recording& r) {
    return r->end == nullptr && (wait || r.use_count() == 1);
  });
  return std::ranges::all_of(step.open, [&](const Recording& r) {
    return r->end != nullptr && over(*r->begin) && over(*r->end);
  });
}

void StepRecorder::read_times(Step& step) {
  StepRecord& record = step.record;
  record.seconds = step.end->seconds_since(*step.begin);
  const double host_epoch = record.epoch;
  if (step.idle != nullptr && step.idle->done())
    record.epoch = step.idle_epoch - step.idle->seconds_since(*step.begin);
  for (const Recording& r : step.open) {
    StepSpan span = r->span;
    span.begin = r->begin->seconds_since(*step.begin);
    span.end = std::max(span.begin, r->end->seconds_since(*step.begin));
    record.spans.push_back(span);
  }
  const double ahead = host_epoch - record.epoch;
  const auto since_begin = [&](std::chrono::steady_clock::time_point time) {
    return ahead + std::chrono::duration<double>(time - step.host_begin).count();
  };
  for (auto& [span, times] : step.transfers) {
    span.begin = since_begin(times.begin);
    span.end = since_begin(times.end);
    record.spans.push_back(span);
  }
}

}  // namespace strata::engine

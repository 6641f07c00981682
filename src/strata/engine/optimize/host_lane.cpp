#include "strata/engine/optimize/host_lane.h"

#include <algorithm>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <new>
#include <utility>

#include "strata/offload/host_memory.h"

namespace strata::engine {
namespace {

double now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(time).count();
}

// The driver's own wait keeps a core busy, which others need meanwhile.
void wait_for(device::Event& event) {
  while (!event.done()) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

}  // namespace

HostLane::HostLane(device::Device& device, offload::LinkWatch& watch, const UpdateLanes& lanes,
                   Bytes largest)
    : device_(device),
      watch_(watch),
      lanes_(lanes),
      slot_room_(align_up(largest, kFlagRoom)),
      memory_(
          offload::pinned_memory(device, kFlagRoom + slot_room_ * kSlots, memory::Kind::kStaging)),
      flag_(*new (memory_->bytes().data()) device::Flag(0)),
      gate_(device.create_stream()),
      down_(device.create_stream()),
      up_(device.create_stream()),
      thread_([this] { run(); }) {}

HostLane::~HostLane() {
  Work last;
  last.last = true;
  push(std::move(last));
  thread_.join();
  FirstError lost;  // a destructor cannot report it
  for (device::Stream* const stream : {down_.get(), up_.get(), gate_.get()})
    lost.attempt([stream] { stream->synchronize(); });
}

void HostLane::begin(std::function<float()> factor) {
  Work work;
  work.begin = [this, factor = std::move(factor),
                ready = std::shared_ptr<device::Event>(device_.compute_stream().record())] {
    wait_for(*ready);
    factor_ = factor();
    down_->wait_for(*ready);
    up_->wait_for(*ready);
    began_ = now();
    time_ = {};
  };
  push(std::move(work));
}

std::span<std::byte> HostLane::room_for(std::span<const std::byte> weights) {
  STRATA_ASSERT(Bytes(weights.size()) <= slot_room_);
  return slot(next_slot_, weights.size());
}

void HostLane::update(std::vector<Run> runs, std::span<std::byte> weights,
                      std::span<offload::Lease* const> leases) {
  Work job;
  job.runs = std::move(runs);
  job.weights = weights;
  job.slot = next_slot_;
  if (!weights.empty()) {
    next_slot_ = (next_slot_ + 1) % kSlots;
    watch_.count_copies(offload::Link::kDown, Bytes(weights.size()));
    watch_.count_copies(offload::Link::kUp, Bytes(weights.size()));
  }
  push(std::move(job));
  ++pushed_;
  if (leases.empty()) return;
  device_.wait_flag(flag_, pushed_, *gate_);
  for (offload::Lease* const lease : leases) lease->used_in(*gate_);
}

std::unique_ptr<device::Event> HostLane::ended() {
  device_.wait_flag(flag_, pushed_, *gate_);
  return gate_->record();
}

void HostLane::join() {
  watch_.await_copies([&] { device_.compute_stream().wait_for(*ended()); });
}

void HostLane::throw_failure(bool waits) {
  std::unique_lock lock(mutex_);
  if (waits) changed_.wait(lock, [this] { return work_.empty(); });
  error_.rethrow_once();
}

void HostLane::push(Work work) {
  const std::lock_guard lock(mutex_);
  work_.push_back(std::move(work));
  changed_.notify_all();
}

void HostLane::run() {
  std::fesetenv(FE_DFL_ENV);  // a script's thread may round and flush as it likes
  bind_this_thread(lanes_.cores);
  for (std::uint32_t ended = 0;;) {
    FirstError error;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !work_.empty(); });
    Work& work = work_.front();
    if (work.last) break;
    const bool failed = error_.get() != nullptr;
    if (!failed && !work.begin) error.attempt([this] { bring_next(); });
    lock.unlock();
    if (!failed) error.attempt([&] { work.begin ? work.begin() : do_job(work); });
    if (!work.begin) signal(++ended, failed || error.get() != nullptr);
    lock.lock();
    error_.keep(error.get());
    work_.pop_front();
    changed_.notify_all();
  }
  pool_.reset();
}

// Queues the copies of the next jobs' weights to their slots, which all jobs before the first one
// have left. Called with the lock.
void HostLane::bring_next() {
  for (std::size_t i = 0; i < std::min(work_.size(), kSlots); ++i) {
    Work& job = work_[i];
    if (job.begin || job.last) return;
    if (job.weights.empty() || job.brought != nullptr) continue;
    if (back_[job.slot] != nullptr) down_->wait_for(*back_[job.slot]);
    device_.copy(slot(job.slot, job.weights.size()), job.weights, *down_);
    job.brought = down_->record();
  }
}

void HostLane::do_job(Work& job) {
  if (job.brought != nullptr) wait_for(*job.brought);
  if (std::isnan(factor_)) return;
  if (pool_ == nullptr) pool_ = std::make_unique<ThreadPool>(lanes_.threads, lanes_.cores);
  for (Run& run : job.runs) {
    run.scalars.gradient_scale = factor_;
    device_.adam_step_on_host(run.spans, run.scalars, *pool_);
    time_.numel += Numel(static_cast<std::int64_t>(run.spans.numel()));
  }
  if (!job.weights.empty()) {
    device_.copy(job.weights, slot(job.slot, job.weights.size()), *up_);
    back_[job.slot] = up_->record();
  }
  time_.seconds = now() - began_;
}

// The copies of ended jobs are over where the flag says so.
void HostLane::signal(std::uint32_t ended, bool failed) noexcept {
  FirstError error;
  if (!failed) error.attempt([&] { device_.write_flag(flag_, ended, *up_); });
  if (!failed && error.get() == nullptr) return;
  error.attempt([this] { up_->synchronize(); });  // what it will write is less
  flag_.store(ended, std::memory_order_release);
}

}  // namespace strata::engine

#include "strata/engine/optimize/host_lane.h"

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

}  // namespace

HostLane::HostLane(device::Device& device, offload::LinkWatch& watch, const UpdateLanes& lanes)
    : device_(device),
      watch_(watch),
      lanes_(lanes),
      memory_(offload::pinned_memory(device, 4_KiB, memory::Kind::kStaging)),
      flag_(*new (memory_->bytes().data()) device::Flag(0)),
      gate_(device.create_stream()),
      thread_([this] { run(); }) {}

HostLane::~HostLane() {
  Work last;
  last.last = true;
  push(std::move(last));
  thread_.join();
  FirstError lost;  // a destructor cannot report it
  lost.attempt([this] { gate_->synchronize(); });
}

void HostLane::begin(std::function<float()> factor) {
  Work work;
  work.begin = [this, factor = std::move(factor),
                ready = std::shared_ptr<device::Event>(device_.compute_stream().record())] {
    // The driver's own wait keeps a core busy, which others need meanwhile.
    while (!ready->done()) std::this_thread::sleep_for(std::chrono::microseconds(20));
    factor_ = factor();
    began_ = now();
    time_ = {};
  };
  push(std::move(work));
}

void HostLane::update(std::vector<Run> runs, std::span<offload::Lease* const> leases) {
  Work job;
  job.runs = std::move(runs);
  push(std::move(job));
  device_.wait_flag(flag_, ++pushed_, *gate_);
  for (offload::Lease* const lease : leases) lease->used_in(*gate_);
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
    lock.unlock();
    if (!failed) error.attempt([&] { work.begin ? work.begin() : do_job(work); });
    if (!work.begin) flag_.store(++ended, std::memory_order_release);
    lock.lock();
    error_.keep(error.get());
    work_.pop_front();
    changed_.notify_all();
  }
  pool_.reset();
}

void HostLane::do_job(Work& job) {
  if (std::isnan(factor_)) return;
  if (pool_ == nullptr) pool_ = std::make_unique<ThreadPool>(lanes_.threads, lanes_.cores);
  for (Run& run : job.runs) {
    run.scalars.gradient_scale = factor_;
    device_.adam_step_on_host(run.spans, run.scalars, *pool_);
    time_.numel += Numel(static_cast<std::int64_t>(run.spans.numel()));
  }
  time_.seconds = now() - began_;
}

}  // namespace strata::engine

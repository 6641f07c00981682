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

constexpr auto kLookAtDevice = std::chrono::milliseconds(200);
constexpr std::int64_t kPlaces = 8;  // of the ring: a stream sees a count some milliseconds late

double now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(time).count();
}

}  // namespace

HostLane::HostLane(device::Device& device, offload::LinkWatch& watch, const UpdateLanes& lanes,
                   const Weights& weights)
    : device_(device),
      watch_(watch),
      lanes_(lanes),
      memory_(offload::pinned_memory(device, 4_KiB, memory::Kind::kStaging)),
      ended_(*new (memory_->bytes().data()) device::Flag(0)),
      arrived_(*new (memory_->bytes().data() + 2048) device::Flag(0)),
      gate_(device.create_stream()),
      coming_(device.create_stream()) {
  if (weights.parts > 0) {
    const std::int64_t count = std::min(kPlaces, weights.parts);
    const Bytes each = align_up(weights.largest, 4_KiB);
    ring_ = offload::pinned_memory(device, each * count, memory::Kind::kStaging);
    for (std::int64_t i = 0; i < count; ++i)
      places_.push_back({ring_->bytes().subspan((each * i).size(), each.size()), {}});
  }
  thread_ = std::thread([this] { run(); });
}

HostLane::~HostLane() {
  push({{}, {}, 0, /*last=*/true});
  FirstError lost;  // a destructor cannot report it
  lost.attempt([this] { coming_->synchronize(); });
  device_lost_ = lost.get() != nullptr;
  thread_.join();
  lost.attempt([this] { gate_->synchronize(); });
}

void HostLane::begin(std::function<float()> factor) {
  coming_->wait_for(*device_.compute_stream().record());
  device_.write_flag(arrived_, ++coming_count_, *coming_);
  push({std::move(factor), {}, coming_count_});
}

std::span<std::byte> HostLane::bring(std::span<std::byte> weights) {
  Place& place = places_[next_++ % places_.size()];
  if (place.free != nullptr) coming_->wait_for(*place.free);
  const std::span<std::byte> here = place.bytes.first(weights.size());
  watch_.copy(offload::Link::kDown, Bytes(here.size()), *coming_,
              [&] { device_.copy(here, weights, *coming_); });
  device_.write_flag(arrived_, ++coming_count_, *coming_);
  place.from = weights;
  brought_ = &place;
  return here;
}

void HostLane::update(std::vector<Run> runs) {
  push({{}, std::move(runs), coming_count_});
  device_.wait_flag(ended_, ++pushed_, *gate_);
  Place* const place = std::exchange(brought_, nullptr);
  if (place == nullptr) return;
  watch_.copy(offload::Link::kUp, Bytes(place->from.size()), *gate_,
              [&] { device_.copy(place->from, place->bytes.first(place->from.size()), *gate_); });
  place->free = gate_->record();
}

void HostLane::throw_failure(bool waits) {
  std::unique_lock lock(mutex_);
  while (waits && !work_.empty()) {
    if (changed_.wait_for(lock, kLookAtDevice) != std::cv_status::timeout) continue;
    FirstError lost;  // apart from a job's error, after which the device goes on
    lost.attempt([this] { coming_->record(); });
    device_lost_ = lost.get() != nullptr;
    error_.keep(lost.get());
  }
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
    lock.unlock();
    while (!device_lost_ && !device::reached(arrived_.load(std::memory_order_acquire), work.after))
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    if (!device_lost_) error.attempt([&] { do_work(work); });
    if (error.get() != nullptr) factor_ = std::nanf("");  // the step's later jobs change nothing
    if (!work.factor) ended_.store(++ended, std::memory_order_release);
    lock.lock();
    error_.keep(error.get());
    work_.pop_front();
    changed_.notify_all();
  }
  pool_.reset();
}

void HostLane::do_work(Work& work) {
  if (work.factor) {
    factor_ = work.factor();
    began_ = now();
    time_ = {};
  }
  if (std::isnan(factor_)) return;
  if (pool_ == nullptr) pool_ = std::make_unique<ThreadPool>(lanes_.threads, lanes_.cores);
  for (Run& run : work.runs) {
    run.scalars.gradient_scale = factor_;
    device_.adam_step_on_host(run.spans, run.scalars, *pool_);
    time_.numel += Numel(static_cast<std::int64_t>(run.spans.numel()));
  }
  time_.seconds = now() - began_;
}

}  // namespace strata::engine

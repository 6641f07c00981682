#include "strata/engine/record/links.h"

#include <algorithm>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "strata/memory/host_buffer.h"

namespace strata::engine {
namespace {

// As large as what the engine copies at once at most.
constexpr Bytes kSample = 16_MiB;
constexpr int kCopies = 4;

// Not Event::wait(), which would count as a wait of the engine's steps.
void come_to(device::Event& event) {
  while (!event.done()) std::this_thread::yield();
}

}  // namespace

LinkSpeed measure_link(device::Device& device) {
  const auto there = device.allocate_uncharged(kSample);
  if (device.host_accessible(there->bytes().data())) return {};
  memory::HostBuffer host(kSample);
  const auto pinned = device.pin(host.bytes());
  const auto stream = device.create_stream();
  const auto gb_per_s = [&](std::span<std::byte> target, std::span<const std::byte> source) {
    double best = 0.0;
    for (int i = 0; i < kCopies; ++i) {
      const auto begin = stream->record_timed();
      device.copy(target, source, *stream);
      const auto end = stream->record_timed();
      come_to(*begin);
      come_to(*end);
      const double seconds = end->seconds_since(*begin);
      if (seconds > 0.0) best = std::max(best, static_cast<double>(kSample.value) / seconds * 1e-9);
    }
    return best;
  };
  return {.up_gb_per_s = gb_per_s(there->bytes(), host.bytes()),
          .down_gb_per_s = gb_per_s(host.bytes(), there->bytes())};
}

Links::Links(device::Device& device, std::vector<std::shared_ptr<offload::StateStore>> stores,
             bool offloads, StepRecorder& recorder)
    : device_(device), stores_(std::move(stores)), offloads_(offloads) {
  std::erase(stores_, nullptr);
  recorder.set_store_counts([this] { return counts(); });
  for (const auto& store : stores_) store->watch(&recorder);
}

Links::~Links() {
  for (const auto& store : stores_) store->watch(nullptr);
}

offload::StoreCounts Links::counts() const {
  offload::StoreCounts all;
  for (const auto& store : stores_) all.add(store->counts());
  return all;
}

// Stores in one folder count together.
std::vector<offload::DriveWrites> Links::drive_writes() const {
  std::vector<offload::DriveWrites> all;
  for (const auto& store : stores_) {
    for (const offload::DriveWrites& each : store->drive_writes()) {
      const auto same = std::ranges::find(all, each.folder, &offload::DriveWrites::folder);
      if (same == all.end())
        all.push_back(each);
      else
        same->written += each.written;
    }
  }
  return all;
}

void Links::measure_limits() noexcept {
  measured_ = true;
  using enum offload::Link;
  try {
    if (device_.runs_ahead()) {
      const LinkSpeed speed = measure_link(device_);
      limit_of(kUp) = speed.up_gb_per_s;
      limit_of(kDown) = speed.down_gb_per_s;
    }
  } catch (const std::exception&) {
    limit_of(kUp) = limit_of(kDown) = 0.0;
  }
  try {
    std::set<std::vector<std::string>> seen;  // drives that several stores share are measured once
    for (const auto& store : stores_) {
      std::vector<std::string> folders;
      for (const offload::DriveWrites& each : store->drive_writes()) folders.push_back(each.folder);
      if (folders.empty() || !seen.insert(folders).second) continue;
      const offload::DriveLimit limit = store->measure_drives();
      limit_of(kRead) += limit.read_gb_per_s;
      limit_of(kWrite) += limit.write_gb_per_s;
    }
  } catch (const std::exception&) {
    limit_of(kRead) = limit_of(kWrite) = 0.0;
  }
}

std::optional<LinkReport> Links::report(const StepRecord& record, bool measure) {
  if (!offloads_) return std::nullopt;
  if (measure && !measured_) measure_limits();
  const std::vector<offload::DriveWrites> drives = drive_writes();
  LinkReport report = make_link_report(record, device_.runs_ahead(), !drives.empty());
  report.drive_writes = drives;
  for (LinkUse& use : report.uses) {
    double& limit = limit_of(use.link);
    if (limit <= 0.0) continue;
    limit = std::max(limit, use.gb_per_s.value_or(0.0));
    use.limit_gb_per_s = limit;
  }
  return report;
}

std::optional<StepReport> make_step_report(StepRecorder& recorder, bool wait, int world_size,
                                           Links* links) {
  recorder.resolve(wait);
  if (recorder.last() == nullptr) return std::nullopt;
  StepReport report = make_step_report(*recorder.last(), world_size);
  if (links != nullptr) report.links = links->report(*recorder.last(), wait);
  return report;
}

}  // namespace strata::engine

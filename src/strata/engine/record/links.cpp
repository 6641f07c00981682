#include "strata/engine/record/links.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "strata/base/error.h"
#include "strata/engine/record/link_speed.h"

namespace strata::engine {
namespace {

std::vector<std::shared_ptr<offload::StateStore>> without_null(
    std::vector<std::shared_ptr<offload::StateStore>> stores) {
  std::erase(stores, nullptr);
  return stores;
}

}  // namespace

Links::Links(device::Device& device, std::vector<std::shared_ptr<offload::StateStore>> stores,
             bool offloads, StepRecorder& recorder)
    : device_(device), stores_(without_null(std::move(stores))), offloads_(offloads) {
  recorder.set_store_counts([this] { return counts(); });
  for (const auto& store : stores_) store->watch(&recorder);
}

Links::~Links() {
  for (const auto& store : stores_) store->watch(nullptr);
}

offload::StoreCounts Links::counts() const {
  offload::StoreCounts all;
  for (const auto& store : stores_) all = all + store->counts();
  return all;
}

// Stores in one folder count together.
std::vector<offload::DriveWrites> Links::wear() const {
  std::vector<offload::DriveWrites> all;
  for (const auto& store : stores_) {
    for (const offload::DriveWrites& each : store->wear()) {
      const auto same = std::ranges::find(all, each.folder, &offload::DriveWrites::folder);
      if (same == all.end()) {
        all.push_back(each);
      } else {
        same->written += each.written;
      }
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
      for (const offload::DriveWrites& each : store->wear()) folders.push_back(each.folder);
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
  const std::vector<offload::DriveWrites> drives = wear();
  LinkReport report = make_link_report(record, device_.runs_ahead(), !drives.empty());
  report.wear = drives;
  for (LinkUse& use : report.uses) {
    double& limit = limit_of(use.link);
    if (limit <= 0.0) continue;
    limit = std::max(limit, use.gb_per_s.value_or(0.0));
    use.limit_gb_per_s = limit;
  }
  return report;
}

}  // namespace strata::engine

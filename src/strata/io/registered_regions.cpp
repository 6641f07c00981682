#include "strata/io/registered_regions.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>

#include "strata/base/error.h"

namespace strata::io {
namespace {

std::uintptr_t address_of(const std::byte* memory) {
  return reinterpret_cast<std::uintptr_t>(memory);
}

std::string refusal(int code, std::size_t bytes) {
  if (code != ENOMEM) return fmt::format("the kernel does not register it: {}", errno_text(code));
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  return fmt::format(
      "registered memory counts as locked, and the limit is too small: raise it (ulimit -l): "
      "wanted={} limit={} {}",
      bytes, limit.rlim_cur, errno_text(code));
}

}  // namespace

RegisteredRegions::RegisteredRegions(RequestRing& ring) : ring_(ring) {
  for (int number = ring.regions_max(); number > 0; --number) free_.push_back(number - 1);
}

std::string RegisteredRegions::add(std::span<std::byte> memory) {
  if (memory.empty()) return "there is none";
  if (overlaps(memory)) return "some of it is registered already";
  if (ring_.regions_max() == 0) return "the kernel is older than 5.19";
  for (std::size_t at = 0; at < memory.size();) {
    const std::span part =
        memory.subspan(at, std::min(memory.size() - at, RequestRing::kRegionMax.size()));
    const int code = free_.empty() ? ENOSPC : ring_.register_region(free_.back(), part);
    if (code != 0) {
      remove(memory.first(at));
      return refusal(code, memory.size());
    }
    by_begin_[address_of(part.data())] = {address_of(part.data()) + part.size(), free_.back()};
    free_.pop_back();
    at += part.size();
  }
  return {};
}

void RegisteredRegions::remove(std::span<std::byte> memory) {
  const std::uintptr_t end = address_of(memory.data()) + memory.size();
  auto region = by_begin_.lower_bound(address_of(memory.data()));
  while (region != by_begin_.end() && region->first < end) {
    ring_.unregister_region(region->second.number);
    free_.push_back(region->second.number);
    region = by_begin_.erase(region);
  }
}

int RegisteredRegions::find(const std::byte* memory, std::size_t bytes) const {
  auto region = by_begin_.upper_bound(address_of(memory));
  if (region == by_begin_.begin()) return -1;
  --region;
  return address_of(memory) + bytes <= region->second.end ? region->second.number : -1;
}

bool RegisteredRegions::overlaps(std::span<const std::byte> memory) const {
  auto after = by_begin_.lower_bound(address_of(memory.data()) + memory.size());
  return after != by_begin_.begin() && std::prev(after)->second.end > address_of(memory.data());
}

}  // namespace strata::io

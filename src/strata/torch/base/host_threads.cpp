#include "strata/torch/base/host_threads.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string_view>

namespace strata::torch {
namespace {

constexpr int kThreadsOfALink = 8;  // copy as fast as a PCIe 5 link of 16 lanes drains

int cores_of_affinity() {
  // Machines with more cores than a cpu_set_t has bits refuse it.
  for (int most = CPU_SETSIZE; most <= (1 << 20); most *= 4) {
    cpu_set_t* const set = CPU_ALLOC(static_cast<std::size_t>(most));
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(most));
    const int count = ::sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
  }
  return 1;
}

int cores_of_quota(double quota, double period) {
  if (!(quota > 0.0) || !(period > 0.0)) return std::numeric_limits<int>::max();
  return std::max(1, static_cast<int>(std::ceil(quota / period)));
}

// A container may have all cores and a share of their time; it sees its own group as the root.
int cores_of_group() {
  double quota = 0.0;
  double period = 0.0;
  if (std::ifstream both("/sys/fs/cgroup/cpu.max"); both >> quota >> period)
    return cores_of_quota(quota, period);  // "max", no limit, is no number
  std::ifstream quota_file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream period_file("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (quota_file >> quota && period_file >> period) return cores_of_quota(quota, period);
  return std::numeric_limits<int>::max();
}

}  // namespace

int usable_cores() {
  return std::min(cores_of_affinity(), cores_of_group());
}

int ranks_of_host(int world_size) {
  const char* const text = std::getenv("LOCAL_WORLD_SIZE");
  if (text == nullptr) return world_size;
  const std::string_view written(text);
  int ranks = 0;
  const auto [stop, error] =
      std::from_chars(written.data(), written.data() + written.size(), ranks);
  const bool makes_sense = error == std::errc() && stop == written.data() + written.size();
  return makes_sense && ranks >= 1 ? std::min(ranks, world_size) : world_size;
}

int host_threads(std::optional<int> wanted, int world_size) {
  if (wanted) return *wanted;
  return std::clamp(usable_cores() / ranks_of_host(world_size), 1, kMostHostThreads);
}

int reference_threads(std::optional<int> wanted, int world_size) {
  const int share = host_threads(wanted, world_size);
  if (wanted) return share;
  const int others = ranks_of_host(world_size) - 1;
  const int left = usable_cores() - others * std::min(share, kThreadsOfALink);
  return std::clamp(left, share, 2 * kMostHostThreads);
}

io::ThreadEngineOptions reading_options(int threads) {
  return {.threads = std::clamp(threads * 3 / 4, 4, 16), .piece = 1_MiB};
}

}  // namespace strata::torch

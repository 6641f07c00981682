#include "strata/torch/base/host_threads.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string_view>

#include "strata/base/thread_pool.h"

namespace strata::torch {
namespace {

constexpr int kThreadsOfALink = 8;  // copy as fast as a PCIe 5 link of 16 lanes drains

int cores_of_quota(double quota, double period) {
  if (!(quota > 0.0) || !(period > 0.0)) return std::numeric_limits<int>::max();
  return std::max(1, static_cast<int>(std::ceil(quota / period)));
}

// A container may have all cores but only a share of their time; it sees its own group as the root.
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

std::optional<int> number_in(const char* variable) {
  const char* const text = std::getenv(variable);
  if (text == nullptr) return std::nullopt;
  const std::string_view written(text);
  int number = 0;
  const char* const end = written.data() + written.size();
  const auto [stop, error] = std::from_chars(written.data(), end, number);
  return error == std::errc() && stop == end ? std::optional(number) : std::nullopt;
}

}  // namespace

int usable_cores() {
  const int allowed = std::max(1, static_cast<int>(allowed_cores().size()));
  return std::min(allowed, cores_of_group());
}

int ranks_of_host(int world_size) {
  const std::optional<int> ranks = number_in("LOCAL_WORLD_SIZE");
  return ranks && *ranks >= 1 ? std::min(*ranks, world_size) : world_size;
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

std::vector<int> host_cores(int threads) {
  const std::optional<int> rank = number_in("LOCAL_RANK");
  const std::optional<int> ranks = number_in("LOCAL_WORLD_SIZE");
  return rank && ranks ? cores_to_bind(*rank, *ranks, threads) : std::vector<int>();
}

io::ThreadEngineOptions reading_options(int threads) {
  return {.threads = std::clamp(threads * 3 / 4, 4, 16), .piece = 1_MiB};
}

}  // namespace strata::torch

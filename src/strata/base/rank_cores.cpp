#include "strata/base/rank_cores.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <tuple>

namespace strata {
namespace {

constexpr int kMostCores = 1 << 20;

struct FreeCores {
  void operator()(cpu_set_t* set) const { CPU_FREE(set); }
};
using CoreSet = std::unique_ptr<cpu_set_t, FreeCores>;

// "node0" is 0; -1: no node.
int node_in(const std::string& name) {
  constexpr std::size_t kPrefix = 4;
  int node = -1;
  if (name.size() <= kPrefix || name.compare(0, kPrefix, "node") != 0) return -1;
  const char* const end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix, end, node);
  return error == std::errc() && stop == end ? node : -1;
}

int node_of(const std::filesystem::path& core) {
  std::error_code error;
  for (std::filesystem::directory_iterator entry(core, error), end; !error && entry != end;
       entry.increment(error)) {
    const int node = node_in(entry->path().filename().string());
    if (node >= 0) return node;
  }
  return 0;
}

}  // namespace

std::vector<int> allowed_cores() {
  // Machines with more cores than a cpu_set_t has bits refuse it.
  for (int most = CPU_SETSIZE; most <= kMostCores; most *= 4) {
    const CoreSet set(CPU_ALLOC(static_cast<std::size_t>(most)));
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(most));
    if (::sched_getaffinity(0, bytes, set.get()) != 0) continue;
    std::vector<int> cores;
    for (int core = 0; core < most; ++core) {
      if (CPU_ISSET_S(static_cast<std::size_t>(core), bytes, set.get())) cores.push_back(core);
    }
    return cores;
  }
  return {};
}

std::vector<HostCore> places_of(std::span<const int> cores, const std::filesystem::path& system) {
  std::vector<HostCore> places;
  for (const int id : cores) {
    const std::filesystem::path folder = system / ("cpu" + std::to_string(id));
    HostCore core{.id = id, .node = node_of(folder), .physical = id};
    // "0-1" or "0,64": the least comes first.
    if (std::ifstream siblings(folder / "topology/thread_siblings_list"); siblings.good()) {
      int first = 0;
      if (siblings >> first) core.physical = first;
    }
    places.push_back(core);
  }
  return places;
}

std::vector<int> part_of_rank(std::vector<HostCore> cores, int rank, int ranks) {
  if (ranks < 1 || rank < 0 || rank >= ranks || std::ssize(cores) < ranks) return {};
  const auto place = [](const HostCore& c) { return std::tuple(c.node, c.physical, c.id); };
  std::ranges::sort(cores, {}, place);
  std::map<std::pair<int, int>, std::vector<int>> by_core;
  for (const HostCore& core : cores) by_core[{core.node, core.physical}].push_back(core.id);
  std::vector<std::vector<int>> pieces;
  for (const auto& [_, ids] : by_core) pieces.push_back(ids);
  if (std::ssize(pieces) < ranks) {  // then hardware threads are what can be divided
    pieces.clear();
    for (const HostCore& core : cores) pieces.push_back({core.id});
  }
  const std::ptrdiff_t count = std::ssize(pieces);
  std::vector<int> part;
  for (std::ptrdiff_t i = rank * count / ranks; i < (rank + 1) * count / ranks; ++i) {
    const std::vector<int>& piece = pieces[static_cast<std::size_t>(i)];
    part.insert(part.end(), piece.begin(), piece.end());
  }
  std::ranges::sort(part);
  return part;
}

std::vector<int> cores_to_bind(int rank, int ranks, int threads) {
  if (ranks < 2 || threads < 2) return {};  // who has no threads of its own binds none
  const std::vector<int> allowed = allowed_cores();
  if (std::ssize(allowed) < ::sysconf(_SC_NPROCESSORS_ONLN)) return {};
  std::vector<int> part = part_of_rank(places_of(allowed), rank, ranks);
  return std::ssize(part) < threads ? std::vector<int>() : part;
}

void bind_this_thread(std::span<const int> cores) {
  if (cores.empty()) return;
  const auto most = static_cast<std::size_t>(std::ranges::max(cores)) + 1;
  const CoreSet set(CPU_ALLOC(most));
  if (set == nullptr) return;
  const std::size_t bytes = CPU_ALLOC_SIZE(most);
  CPU_ZERO_S(bytes, set.get());
  for (const int core : cores) CPU_SET_S(static_cast<std::size_t>(core), bytes, set.get());
  static_cast<void>(::sched_setaffinity(0, bytes, set.get()));
}

}  // namespace strata

// A fixed set of threads that share one loop. For kernels over large arrays: parallel_for splits
// [0, count) into chunks of `grain` whose boundaries do not depend on the number of threads.
// Threads: parallel_for is called by one thread at a time and takes part in the work itself.
// Its own threads may be bound to cores (bind_this_thread()); the pool never binds the caller's.
// Errors: an exception thrown by `body` is rethrown by parallel_for, the first one by chunk order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "strata/base/interface.h"

namespace strata {

// The cores of a host, and each rank's part of them. If the ranks of a host may all run anywhere,
// they use the same cores, and the system moves their threads away from the memory near them. So
// each rank's threads are bound to its part: whole cores with all their hardware threads, and those
// of one memory node beside each other. Threads: any. Errors: none; facts that the system does not
// report are left out.

// One hardware thread, as Linux numbers it.
struct HostCore {
  int id = 0;
  int node = 0;      // of its memory
  int physical = 0;  // the least id of those that share the core with it
  bool operator==(const HostCore&) const = default;
};

// Those that this thread may run on, in ascending order; empty where the system does not say.
std::vector<int> allowed_cores();

// The same with their places. `system`: Linux's folder of them.
std::vector<HostCore> places_of(std::span<const int> cores,
                                const std::filesystem::path& system = "/sys/devices/system/cpu");

// The hardware threads of rank `rank` among `ranks` ranks of this host, in ascending order. Every
// rank gets whole cores, as equal in number as possible. Empty if there are more ranks than
// hardware threads.
std::vector<int> part_of_rank(std::vector<HostCore> cores, int rank, int ranks);

// The cores to which this rank binds its `threads` threads; empty: it binds none. A rank binds its
// threads if several ranks share the host. It does not if the process is already confined to some
// of the host's cores (a launcher has divided them), or if it has more threads than cores.
std::vector<int> cores_to_bind(int rank, int ranks, int threads);

// From now on this thread runs on these only; where the system refuses, as before.
void bind_this_thread(std::span<const int> cores);

class ThreadPool : NonCopyable {
 public:
  // `threads` >= 1 counts the caller: ThreadPool(1) starts no thread. `cores`: the cores of the
  // other threads; empty: the caller's.
  explicit ThreadPool(int threads, std::vector<int> cores = {});
  ~ThreadPool();

  int threads() const;
  // Calls body(begin, end) for each chunk; returns when all are done.
  void parallel_for(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t, std::int64_t)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Calls body(begin, end) for the same chunks, over `pool` if one is given and there is more than
// one chunk; else in this thread, in their order.
template <typename Body>
void for_chunks(ThreadPool* pool, std::int64_t count, std::int64_t grain, const Body& body) {
  if (pool != nullptr && count > grain) return pool->parallel_for(count, grain, body);
  for (std::int64_t at = 0; at < count; at += grain) body(at, std::min(count, at + grain));
}

}  // namespace strata

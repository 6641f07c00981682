// A fixed set of threads that share one loop. For kernels over large arrays: parallel_for splits
// [0, count) into chunks of `grain` whose boundaries do not depend on the number of threads.
// Threads: parallel_for is called by one thread at a time and takes part in the work itself.
// Its own threads may be bound to cores (base/rank_cores.h); the pool never binds the caller's.
// Errors: an exception thrown by `body` is rethrown by parallel_for, the first one by chunk order.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace strata {

class ThreadPool {
 public:
  // `threads` >= 1 counts the caller: ThreadPool(1) starts no thread. `cores`: the cores of the
  // other threads; empty: the caller's.
  explicit ThreadPool(int threads, std::vector<int> cores = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;
  // Calls body(begin, end) for each chunk; returns when all are done.
  void parallel_for(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t, std::int64_t)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace strata

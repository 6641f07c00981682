// Ranks that are threads of this process, for tests above the torch line.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "strata/comm/host/host_collectives.h"

namespace strata::torch::testing {

// Runs on every rank; a failure of one is rethrown to the caller.
using RankBody = std::function<void(std::shared_ptr<comm::Collectives>)>;

// `group`: has a rank(int).
template <typename Group>
void run_ranks(Group& group, int world, const RankBody& rank) {
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(world));
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back(
        [&, r, collectives = std::shared_ptr<comm::Collectives>(group.rank(r))]() mutable {
          try {
            rank(std::move(collectives));
          } catch (...) {
            failures[static_cast<std::size_t>(r)] = std::current_exception();
          }
        });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

inline void run_ranks(int world, const RankBody& rank) {
  comm::LocalGroup group(world);
  run_ranks(group, world, rank);
}

}  // namespace strata::torch::testing

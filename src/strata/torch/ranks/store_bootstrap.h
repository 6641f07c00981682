// Ranks find each other through a c10d Store (torchrun's, or a TCPStore of one's own).
// Threads: one thread a rank. Ownership: shares the store.
// Errors: CommError that names the ranks which did not come within the timeout.
#pragma once

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "strata/comm/collectives.h"

namespace strata::torch {

class StoreBootstrap final : public comm::Bootstrap {
 public:
  StoreBootstrap(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                 std::chrono::milliseconds timeout);

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  std::vector<std::string> exchange(const std::string& text) override;

 private:
  std::string key(int rank) const;

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int world_size_;
  std::chrono::milliseconds timeout_;
  std::string prefix_;  // distinguishes the bootstraps of one store
  int round_ = 0;
};

}  // namespace strata::torch

// The collectives of a job whose ranks meet in a c10d Store: they compare what they are and want,
// and join as comm/carriers.h has it. Python and the C++ face both come here; what differs is who
// makes process groups, and nobody need.
// Threads: one thread a rank. Ownership: shares the store, also with what it makes.
// Errors: CommError where ranks do not reach each other, or one failed before; ConfigError where
// their settings differ, do not fit them, or name one GPU twice.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/comm/combined/carrier_join.h"
#include "strata/device/host_waits.h"
#include "strata/engine/config/config.h"
#include "strata/torch/ranks/group_backend.h"

namespace strata::torch {

struct JoiningRank {
  int rank = 0;
  int world_size = 1;
  c10::Device place{c10::DeviceType::CPU};  // of the model
  bool on_gpu = false;
  c10::intrusive_ptr<c10d::Store> store;
  // What tells hosts and devices apart; empty: nobody compares them.
  std::string host;
  std::string device;
  bool nccl_runs = false;                    // this process has communicators for the device
  std::shared_ptr<device::HostWaits> waits;  // of make_device(); null: its own
  // "gloo" or "nccl" among these ranks of the world, as each of them calls it. Null: this program
  // makes no process groups.
  std::function<std::shared_ptr<GroupBackend>(const std::string& backend,
                                              const std::vector<int>& ranks)>
      new_backend;
  std::function<void(bool warning, const std::string& text)> say;  // on rank 0; null: to nobody
};

// The same for processes that map each other's memory: boot of one kernel, PID namespace, user.
std::string host_identity();

// Collective. More than one rank.
comm::JoinedCarriers join_ranks(const engine::Config& config, const JoiningRank& rank);

// Instead of join_ranks(), by a rank that failed before: the others learn why there. Waits for them
// no longer than `patience`.
void tell_failure(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                  std::string_view reason, std::chrono::milliseconds patience);

}  // namespace strata::torch

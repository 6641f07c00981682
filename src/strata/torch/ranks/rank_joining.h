// Makes the collectives of a job whose ranks find each other in a c10d Store. The ranks compare
// their hosts, devices and settings, and join as comm/transports.h describes. The Python face and
// the C++ face both call this. They differ in the function that makes process groups, which may be
// absent.
// Threads: one thread a rank. Ownership: shares the store, also with the collectives that it makes.
// Errors: CommError if ranks do not reach each other, or one failed before; ConfigError if their
// settings differ, do not fit the ranks, or name one GPU twice.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/comm/combined/combined_collectives.h"
#include "strata/device/device.h"
#include "strata/engine/config/config.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/ranks/c10d_collectives.h"

namespace strata::torch {

struct JoiningRank {
  int rank = 0;
  int world_size = 1;
  c10::Device place{c10::DeviceType::CPU};  // of the model
  bool on_gpu = false;
  c10::intrusive_ptr<c10d::Store> store;
  // Identify this rank's host and device; ranks with equal texts share them. Empty: not compared.
  std::string host;
  std::string device;
  bool nccl_runs = false;                    // this process has communicators for the device
  std::shared_ptr<device::HostWaits> waits;  // of make_device(); null: its own
  // Makes a "gloo" or "nccl" backend of these ranks of the world; each of them calls it. Null: this
  // program makes no process groups.
  std::function<std::shared_ptr<GroupBackend>(const std::string& backend,
                                              const std::vector<int>& ranks)>
      new_backend;
  std::function<void(bool warning, const std::string& text)> say;  // logs, on rank 0; may be null

  std::shared_ptr<device::Device> make_device() const {
    return torch::make_device(place, 1, waits);
  }
};

// The time that ranks wait for each other.
std::chrono::milliseconds timeout_of(const engine::Config& config);

// Equal for processes that can map each other's memory: same boot of one kernel, same PID
// namespace, same user.
std::string host_identity();

// Collective. More than one rank.
comm::JoinedTransports join_ranks(const engine::Config& config, const JoiningRank& rank);

// Called instead of join_ranks() by a rank that has failed: the others' join_ranks() throws its
// reason. Waits for them at most `patience`.
void tell_failure(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                  std::string_view reason, std::chrono::milliseconds patience);

}  // namespace strata::torch

// Collectives for a model on a GPU: weights and gradients go through a c10d backend that takes
// device memory (NCCL), everything else through a control plane in host memory. Before each bulk
// operation the control plane also compares the operations of all ranks, and it knows which rank
// died.
//
// Order. A bulk operation runs after the work that the calling thread's current stream held when it
// was started, and wait() makes that stream wait for it; the host is not blocked. Work that reads a
// result must go to Device::compute_stream(). A reduction overwrites its contribution. In a world
// of one rank there is no backend: slices are copied, contributions scaled.
// Memory: buffers come from the device, uncharged; freeing one waits for the current stream.
// Threads, errors: see collectives.h; a failure of either plane ends both on this rank, and so does
// letting the backend go.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/torch/ranks/group_backend.h"

namespace strata::torch {

struct DeviceGroup {
  c10::Device place{c10::DeviceType::CPU};
  std::shared_ptr<device::Device> device;      // of `place`, made for this group alone
  std::shared_ptr<comm::Collectives> control;  // of host memory, the same ranks
  std::shared_ptr<GroupBackend> bulk;          // null: one rank
  c10::intrusive_ptr<c10d::Store> store;       // carries the reasons of failures; null: one rank
  std::string id;              // distinguishes groups of one store; same on all ranks, not reused
  std::string name;            // of the backend: "nccl"
  comm::RankNames names = {};  // of the ranks, in errors
};

std::unique_ptr<comm::Collectives> make_device_collectives(DeviceGroup group);

}  // namespace strata::torch

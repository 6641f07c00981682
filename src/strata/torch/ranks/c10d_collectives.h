// Collectives over a backend of a c10d process group: gloo on hosts, NCCL on GPUs. Gathers are
// collectives here, not one-sided, and sums are in the order of the backend. Before each bulk
// operation ranks compare tags. So different operations at one time (one rank reduces 'a', another
// 'b') are an error and not a hang. After the backend was let go, every operation is an error.
// Threads, ownership, errors: see collectives.h; the timeout is the process group's.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "strata/base/error.h"
#include "strata/comm/collectives.h"
#include "strata/device/device.h"

namespace strata::torch {

// The backend of a c10d process group, as collectives use it until let_go(). A backend's threads
// may need Python's lock to release tensors, so they must end before the interpreter does, even if
// collectives live longer. They end with the last reference to the backend, which the process group
// may hold; the caller that ends the interpreter calls let_go() before.
// Threads: one thread a rank; let_go() waits for the backend's, so without Python's lock.
// Errors: get() throws CommError once the backend has gone.
class GroupBackend {
 public:
  explicit GroupBackend(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

  c10d::Backend& get() const {
    if (backend_) return *backend_;
    throw CommError(
        "these collectives have let their process group go, since their engine was destroyed or "
        "the program ends; call initialize() again to go on");
  }
  // Waits for the operations that this rank has started.
  void let_go() noexcept { backend_.reset(); }

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;  // null: let go
};

// For ranks on several hosts, and for processes of one host that may not read each other's memory.
// Arguments: as in DeviceGroup.
std::unique_ptr<comm::Collectives> make_c10d_collectives(std::shared_ptr<GroupBackend> group,
                                                         c10::intrusive_ptr<c10d::Store> store,
                                                         std::string id, std::string name,
                                                         comm::RankNames names = {});

// Collectives for a model on a GPU: weights and gradients go through a c10d backend that takes
// device memory (NCCL), everything else through a control plane in host memory. Before each bulk
// operation the control plane also compares the operations of all ranks, and it knows which rank
// died.
//
// Order. A bulk operation runs after the work that the calling thread's current stream holds, and
// wait() makes that stream wait for it, not the host. Work that reads a result must go to
// Device::compute_stream(). A reduction overwrites its contribution. In a world of one rank there
// is no backend: slices are copied, contributions scaled. Memory: buffers come from the device,
// uncharged; freeing one waits for the current stream. Threads, errors: see collectives.h; a
// failure of either plane ends both on this rank, and so does letting the backend go.
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

// The collectives of a world of one rank. `waits`: make_device().
std::shared_ptr<comm::Collectives> single_rank(c10::Device place,
                                               std::shared_ptr<device::HostWaits> waits = nullptr);

}  // namespace strata::torch

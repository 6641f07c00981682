#include "strata/offload/host_memory.h"

#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/device/cpu_device.h"

namespace strata::offload {
namespace {

std::unique_ptr<device::Memory> host_memory(device::Device& device, Bytes bytes, memory::Kind kind,
                                            bool pinned) {
  if (pinned) return device.allocate_host(bytes, kind);
  return device::CpuDevice({.ledger = device.ledger()}).allocate_host(bytes, kind);  // pins nothing
}

}  // namespace

std::unique_ptr<device::HostMemory> pinned_memory(device::Device& device, Bytes bytes,
                                                  memory::Kind kind) {
  auto memory = device.allocate_host(bytes, kind);
  if (bytes.value == 0 || memory->pinned()) return memory;
  throw OutOfMemoryError(
      "the system does not let this process pin the host memory that kernels of {} are to work on "
      "({}): {} wanted; raise the limit on locked memory (ulimit -l); held: {}",
      device.name(), memory::name_of(kind), to_string(bytes), device.ledger()->report());
}

void offload_all(device::Device& device, std::span<const OffloadedMemory> memory, memory::Kind kind,
                 bool pinned) {
  std::vector<std::unique_ptr<OffloadedCopy>> copies;
  for (const OffloadedMemory& each : memory)
    copies.push_back(host_memory(device, Bytes(each.bytes.size()), kind, pinned));
  for (std::size_t i = 0; i < memory.size(); ++i)
    device.copy(copies[i]->bytes(), memory[i].bytes, device.compute_stream());
  device.compute_stream().synchronize();
  for (std::size_t i = 0; i < memory.size(); ++i) *memory[i].copy = std::move(copies[i]);
}

void reload(device::Device& device, std::unique_ptr<OffloadedCopy>& copy,
            std::span<std::byte> target) {
  device.copy(target, copy->bytes(), device.compute_stream());
  device.compute_stream().synchronize();
  copy.reset();
}

void throw_offloaded(std::string_view what) {
  throw UsageError(
      "{} cannot be used now, since offload_states() has moved it to the host; call "
      "reload_states() first",
      what);
}

}  // namespace strata::offload

#include "strata/offload/pinned_memory.h"

#include <fmt/core.h>

#include "strata/base/error.h"

namespace strata::offload {

std::unique_ptr<device::HostMemory> pinned_memory(device::Device& device, Bytes bytes,
                                                  memory::Kind kind) {
  auto memory = device.allocate_host(bytes, kind);
  if (bytes.value == 0 || memory->pinned()) return memory;
  throw OutOfMemoryError(fmt::format(
      "the system does not let this process pin the host memory that kernels of {} are to work "
      "on ({}): {} wanted; raise the limit on locked memory (ulimit -l); held: {}",
      device.name(), memory::name_of(kind), to_string(bytes), device.ledger()->report()));
}

}  // namespace strata::offload

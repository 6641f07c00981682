// How fast the link between the host and a device is, from a short measurement: the best of some
// copies of pinned memory, one way at a time, by the device's clock. Takes some hundredths of a
// second, most of them to pin the memory; the host waits for it, and nothing is charged. Copies of
// other programs at the same time make the result smaller. Threads: any one. Errors:
// OutOfMemoryError, DeviceError.
#pragma once

#include "strata/device/device.h"

namespace strata::engine {

struct LinkSpeed {
  double up_gb_per_s = 0.0;  // from the host; 0 where host and device are one
  double down_gb_per_s = 0.0;
};

LinkSpeed measure_link(device::Device& device);

}  // namespace strata::engine

// Receives a notification of each transfer over a rank's links: copies between the host and a
// separate device, and transfers of drives. The code that queues a copy or begins a transfer
// notifies this class, at one place for each kind. This base class ignores all notifications.
// Threads: one at a time. Ownership: outlives its callers. Errors: those of the calls that it is
// given.
#pragma once

#include <cstdint>
#include <functional>

#include "strata/base/units.h"
#include "strata/device/device.h"
#include "strata/io/io_engine.h"

namespace strata::offload {

enum class Link : std::uint8_t {
  kUp,    // from the host to the device
  kDown,  // from the device to the host
  kRead,  // from drives
  kWrite,
};
inline constexpr int kLinkCount = 4;

class LinkWatch {
 public:
  using Call = std::function<void()>;

  virtual ~LinkWatch() = default;
  // Calls `queue`, which queues work in `stream` that moves `bytes` up or down: a copy, or a kernel
  // that works on the host's memory.
  virtual void copy(Link /*link*/, Bytes /*bytes*/, device::Stream& /*stream*/, const Call& queue) {
    queue();
  }
  // Calls `wait`, which makes the compute stream wait for such copies.
  virtual void await_copies(const Call& wait) { wait(); }
  // A drive has completed a transfer.
  virtual void record_transfer(Link /*link*/, Bytes /*bytes*/, const io::TransferTimes& /*times*/) {
  }
};

}  // namespace strata::offload

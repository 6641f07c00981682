// Who is told what goes over a rank's links: copies between the host and a device that is apart
// from it, and transfers of drives. Whoever queues or begins one tells it here, at one place each.
// This class itself wants to know nothing. Threads: one at a time. Ownership: outlives who tells
// it. Errors: those of the calls that it is given.
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
  // Calls `queue`, which queues in `stream` what moves so many bytes up or down: a copy, or a
  // kernel that works on the host's memory.
  virtual void copy(Link /*link*/, Bytes /*bytes*/, device::Stream& /*stream*/, const Call& queue) {
    queue();
  }
  // Calls `wait`, which has the compute stream wait for such copies.
  virtual void await_copies(const Call& wait) { wait(); }
  // A transfer of a drive is over and is complete.
  virtual void note_transfer(Link /*link*/, Bytes /*bytes*/, const io::TransferTimes& /*times*/) {}
};

}  // namespace strata::offload

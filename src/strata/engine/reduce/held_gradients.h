// Gradients whose memory their writer keeps until a stream has read them. Other work may use that
// memory afterwards: the compute stream waits for the reading before a gradient is let go. Threads:
// one thread at a time. Ownership: shares the gradients' memory. Errors: DeviceError.
#pragma once

#include <deque>
#include <memory>

#include "strata/device/device.h"

namespace strata::engine {

class HeldGradients {
 public:
  // `most`: bytes that are held at once; the newest gradient may exceed it.
  HeldGradients(device::Device& device, Bytes most) : device_(device), most_(most) {}

  // Until `reader` has done what it holds now. Without an owner the compute stream waits for that.
  void hold(std::shared_ptr<const void> owner, Bytes bytes, device::Stream& reader);
  // Lets go of all.
  void let_go() { let_go(Bytes()); }
  // The same where the host has waited for all streams.
  void forget();

 private:
  struct Held {
    std::shared_ptr<const void> owner;
    Bytes bytes;
    std::unique_ptr<device::Event> read;
  };
  void let_go(Bytes most);

  device::Device& device_;
  Bytes most_;
  std::deque<Held> held_;
  Bytes bytes_;
};

}  // namespace strata::engine

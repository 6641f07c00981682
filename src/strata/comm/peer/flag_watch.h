// Watches the flags of peers for which this rank's streams wait, so that no wait lasts for ever: a
// stopped or hanging peer never writes its flag, and its socket stays open. Time is counted
// in looks, some in each timeout: a whole job that is stopped and goes on again has missed at most
// one. Threads: internally synchronised. Ownership: borrows the flags, which outlive it. Units:
// milliseconds.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "strata/comm/peer/peer_flags.h"
#include "strata/device/device.h"

namespace strata::comm {

struct LatePeer {
  int rank = 0;
  std::string failure;  // what follows its name: "lives but ..."
};

class FlagWatch {
 public:
  static constexpr int kLooks = 4;  // in a timeout

  explicit FlagWatch(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  // A stream is about to wait until the flag, which `peer` writes, has reached `value`.
  void expect(PeerFlags::Kind kind, int peer, const device::Flag& flag, std::uint32_t value);
  // The same, and has the stream wait.
  void wait_for(device::Device& device, PeerFlags::Kind kind, int peer, const device::Flag& flag,
                std::uint32_t value, device::Stream& stream) {
    expect(kind, peer, flag, value);
    device.wait_flag(flag, value, stream);
  }
  // Called kLooks times in a timeout. A peer for which a stream waited at more looks in a row.
  std::optional<LatePeer> look();

 private:
  // The oldest value of one flag that is not known to be there, and the newest.
  struct Wait {
    PeerFlags::Kind kind = PeerFlags::Kind::kWritten;
    int peer = 0;
    std::uint32_t oldest = 0;
    std::uint32_t newest = 0;
    int looks = 0;  // at which the oldest was not there
  };

  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::map<const device::Flag*, Wait> waits_;  // guarded by mutex_
};

}  // namespace strata::comm

// Copies of host memory in device memory, for kernels that would otherwise read and write it over
// the link word by word. Copy engines bring the data and take it back at the link's full speed, in
// both directions at once, beside the kernels. The host never waits.
//
// Memory: one ring on the device, charged as staging. A caller may always hold copies of share()
// bytes. Threads: one. Ownership: the device outlives the stage, the stage outlives its copies, and
// a copy dies before the lease whose bytes it copies. Errors: OutOfMemoryError from the
// constructor. If taking a copy back fails, the next bring() or join() throws that error, and the
// changes in that copy are lost. Once the device has failed, destructors throw nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <span>

#include "strata/base/interface.h"
#include "strata/device/device.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

class DeviceStage : NonCopyable {
 public:
  // `largest`: the most bytes that any caller brings at once. Where that is large, share() is less.
  // The stage notifies `watch` of every copy.
  DeviceStage(device::Device& device, Bytes largest, LinkWatch& watch);
  ~DeviceStage();  // waits for copies under way

  // The bytes that may be held at once, in at most kPieces pieces.
  Bytes share() const { return share_; }
  static constexpr std::int64_t kPieces = 16;

  // From here on, bring() copies values as all work that the compute stream holds now leaves them.
  void begin();
  // Copies the bytes that `lease` lends; kernels on the compute stream find the copy complete.
  // After kReadWrite the destructor of the copy sends back what kernels have written, and the lease
  // may be returned then.
  std::unique_ptr<Lease> bring(Lease& lease, std::span<std::byte> bytes, Access access);
  // A copy that is only read. The host memory outlives it, and stays unwritten until join().
  std::unique_ptr<Lease> bring(std::span<const std::byte> host);
  // Work that the compute stream gets from here on finds the returned bytes in host memory.
  void join();

 private:
  class Copy;
  // A piece of the ring. Once it is given back (`back`), it is free after the event `free`.
  struct Taken {
    Bytes begin;
    Bytes end;
    bool back = false;
    std::unique_ptr<device::Event> free;  // null: nothing uses it
  };
  std::shared_ptr<Taken> take(Bytes bytes);
  std::span<std::byte> bytes_of(const Taken& taken, std::size_t bytes);
  std::unique_ptr<Lease> bring(Lease* lease, std::span<std::byte> host, Access access);
  void take_back(Taken& taken, Lease* lease, std::span<std::byte> host, Access access) noexcept;
  void throw_failure();

  device::Device& device_;
  LinkWatch& watch_;
  const Bytes share_;
  const std::unique_ptr<device::Memory> memory_;
  const std::unique_ptr<device::Stream> coming_;
  const std::unique_ptr<device::Stream> leaving_;
  Bytes head_;
  std::deque<std::shared_ptr<Taken>> taken_;  // as they lie in the ring, the oldest first
  std::exception_ptr failure_;
};

}  // namespace strata::offload

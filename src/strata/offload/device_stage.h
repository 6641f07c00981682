// Copies of host memory in memory of the device, for kernels that would otherwise read and write it
// over the link word by word: copy engines bring it and take it back at the link's full speed, both
// directions at once, beside the kernels. What is brought next is copied while kernels work on what
// was brought before, and while that before goes back, as long as the stage has room; nobody waits
// on the host.
//
// Memory. One ring on the device, charged as staging. At any time copies of share() bytes may be
// held. Threads: one. Ownership: the device outlives the stage, the stage its copies, and a copy
// dies before the lease that it is of. Errors: OutOfMemoryError from the constructor. An error
// while a copy is given back is thrown by the next bring() or join(); what it should have changed
// is lost. Where the device has failed, what is destroyed throws nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <span>

#include "strata/device/device.h"
#include "strata/offload/link_watch.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

class DeviceStage {
 public:
  // `largest`: what anybody would bring at once. Where that is much, share() is less. `watch` is
  // told of every copy.
  DeviceStage(device::Device& device, Bytes largest, LinkWatch& watch);
  ~DeviceStage();  // waits for what goes on
  DeviceStage(const DeviceStage&) = delete;
  DeviceStage& operator=(const DeviceStage&) = delete;

  // The bytes that may be held at once, in at most kPieces pieces.
  Bytes share() const { return share_; }
  static constexpr std::int64_t kPieces = 16;

  // What is brought from here on is as everything that the compute stream holds now leaves it.
  void begin();
  // A copy of these bytes, which `lease` lends; kernels on the compute stream find it. Destroyed
  // after kReadWrite, what they have written goes back; the lease may be given back then.
  std::unique_ptr<Lease> bring(Lease& lease, std::span<std::byte> bytes, Access access);
  // To read alone; the memory stays and is not written before join().
  std::unique_ptr<Lease> bring(std::span<const std::byte> host);
  // What the compute stream gets from here on finds in host memory what was taken back.
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

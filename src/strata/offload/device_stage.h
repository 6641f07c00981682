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

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <span>
#include <utility>

#include "strata/base/error.h"
#include "strata/base/interface.h"
#include "strata/device/device.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

class DeviceStage : NonCopyable {
 public:
  // `largest`: the most bytes that any caller brings at once. Where that is large, share() is less.
  // The stage notifies `watch` of every copy.
  DeviceStage(device::Device& device, Bytes largest, LinkWatch& watch)
      : device_(device),
        watch_(watch),
        share_(std::min(largest, kShareMax)),
        memory_(device.allocate(room_of_pieces(share_) * kSharesHeld, memory::Kind::kStaging)),
        coming_(device.create_stream()),
        leaving_(device.create_stream()) {}
  // waits for copies under way
  ~DeviceStage() {
    FirstError lost;  // a failed device runs nothing, and a destructor cannot report it
    lost.attempt([this] { coming_->synchronize(); });
    lost.attempt([this] { device_.compute_stream().synchronize(); });
    lost.attempt([this] { leaving_->synchronize(); });
  }

  // The bytes that may be held at once, in at most kPieces pieces.
  Bytes share() const { return share_; }
  static constexpr std::int64_t kPieces = 16;

  // From here on, bring() copies values as all work that the compute stream holds now leaves them.
  void begin() { coming_->wait_for(*device_.compute_stream().record()); }
  // Copies the bytes that `lease` lends; kernels on the compute stream find the copy complete.
  // After kReadWrite the destructor of the copy sends back what kernels have written, and the lease
  // may be returned then.
  std::unique_ptr<Lease> bring(Lease& lease, std::span<std::byte> bytes, Access access) {
    return bring(&lease, bytes, access);
  }
  // A copy that is only read. The host memory outlives it, and stays unwritten until join().
  std::unique_ptr<Lease> bring(std::span<const std::byte> host) {
    // Not written, since it is brought to be read.
    return bring(nullptr, {const_cast<std::byte*>(host.data()), host.size()}, Access::kRead);
  }
  // Work that the compute stream gets from here on finds the returned bytes in host memory.
  void join() {
    throw_failure();
    watch_.await_copies([&] { device_.compute_stream().wait_for(*leaving_->record()); });
  }

 private:
  // Copies of some megabytes run at the link's speed.
  static constexpr Bytes kShareMax = 16_MiB;
  // One share is worked on, one comes and one leaves; as many again, so that none of the three
  // waits for another.
  static constexpr std::int64_t kSharesHeld = 6;
  static constexpr Bytes kAlignmentOnDevice = 256_B;

  static Bytes room_of_pieces(Bytes bytes) { return bytes + kAlignmentOnDevice * kPieces; }
  // A piece of the ring. Once it is given back (`back`), it is free after the event `free`.
  struct Taken {
    Bytes begin;
    Bytes end;
    bool back = false;
    std::unique_ptr<device::Event> free;  // null: nothing uses it
  };
  class Copy final : public Lease {
   public:
    Copy(DeviceStage& stage, std::shared_ptr<Taken> taken, Lease* lease, std::span<std::byte> host,
         Access access)
        : stage_(stage), taken_(std::move(taken)), lease_(lease), host_(host), access_(access) {}
    ~Copy() override { stage_.take_back(*taken_, lease_, host_, access_); }
    std::span<std::byte> bytes() override { return stage_.bytes_of(*taken_, host_.size()); }

   private:
    DeviceStage& stage_;
    const std::shared_ptr<Taken> taken_;
    Lease* const lease_;  // null: host memory that stays
    const std::span<std::byte> host_;
    const Access access_;
  };
  // Copies leave the ring in the order in which they came: the oldest one lies where the next will.
  std::shared_ptr<Taken> take(Bytes bytes) {
    const Bytes room = align_up(std::max(bytes, 1_B), kAlignmentOnDevice);
    const Bytes size(static_cast<std::int64_t>(memory_->bytes().size()));
    STRATA_ASSERT(room <= size);
    if (size < head_ + room) head_ = Bytes();
    auto taken = std::make_shared<Taken>(Taken{head_, head_ + room, false, nullptr});
    const auto in_the_way = [&](const std::shared_ptr<Taken>& other) {
      return std::max(other->begin, taken->begin) < std::min(other->end, taken->end);
    };
    while (std::ranges::any_of(taken_, in_the_way)) {
      const Taken& oldest = *taken_.front();
      STRATA_ASSERT(oldest.back);  // else more than a share is held
      if (oldest.free != nullptr) coming_->wait_for(*oldest.free);
      taken_.pop_front();
    }
    head_ = taken->end;
    taken_.push_back(taken);
    return taken;
  }
  std::span<std::byte> bytes_of(const Taken& taken, std::size_t bytes) {
    return memory_->bytes().subspan(taken.begin.size(), bytes);
  }
  std::unique_ptr<Lease> bring(Lease* lease, std::span<std::byte> host, Access access) {
    throw_failure();
    std::shared_ptr<Taken> taken = take(Bytes(static_cast<std::int64_t>(host.size())));
    watch_.copy(Link::kUp, Bytes(host.size()), *coming_,
                [&] { device_.copy(bytes_of(*taken, host.size()), host, *coming_); });
    watch_.await_copies([&] { device_.compute_stream().wait_for(*coming_->record()); });
    if (lease != nullptr && access == Access::kRead) lease->used_in(*coming_);
    return std::make_unique<Copy>(*this, std::move(taken), lease, host, access);
  }
  void take_back(Taken& taken, Lease* lease, std::span<std::byte> host, Access access) noexcept {
    taken.back = true;
    try {
      const std::unique_ptr<device::Event> worked = device_.compute_stream().record();
      leaving_->wait_for(*worked);
      if (access == Access::kReadWrite) {
        watch_.copy(Link::kDown, Bytes(host.size()), *leaving_,
                    [&] { device_.copy(host, bytes_of(taken, host.size()), *leaving_); });
        if (lease != nullptr) lease->used_in(*leaving_);
      }
      taken.free = leaving_->record();
    } catch (...) {
      failure_ = std::current_exception();
    }
  }
  void throw_failure() {
    if (failure_ != nullptr) std::rethrow_exception(failure_);
  }

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

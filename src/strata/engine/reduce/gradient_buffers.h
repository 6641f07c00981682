// Flat gradient buffers: memory that peers can read. A unit takes one when its first gradient
// arrives, and gives it back when its reduction has ended. Free buffers are kept by exact size
// (units repeat), so after the first passes nothing is allocated. The number in use at once depends
// on when reductions end; so as many are kept as the busiest of the last passes used, and the
// others are freed. The first pass does not count once there is another: its order is not known
// before, so it may need many more.
// Threads: one thread at a time. Ownership: a Buffer goes back to its pool, which must outlive it.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/comm/inbox.h"
#include "strata/device/device.h"
#include "strata/engine/unit/unit.h"
#include "strata/memory/ledger.h"

namespace strata::engine {

class GradientBuffers {
 public:
  struct Allocation {
    std::unique_ptr<comm::SharedBuffer> memory;
    memory::Charge charge;
    // The end of this rank's part of the reduction that reads the memory, if that part runs on a
    // stream; null: there is nothing to wait for.
    std::unique_ptr<device::Event> read = nullptr;
  };
  using Buffer = std::unique_ptr<Allocation>;  // null: none

  GradientBuffers(std::string name, comm::Collectives& collectives,
                  std::shared_ptr<memory::Ledger> ledger)
      : name_(std::move(name)), collectives_(collectives), ledger_(std::move(ledger)) {}

  Buffer take(Bytes bytes);
  void give_back(Buffer buffer);
  void end_pass();
  // Frees all buffers that are not in use.
  void free_unused();
  int allocations() const { return allocations_; }

 private:
  std::string name_;
  comm::Collectives& collectives_;
  std::shared_ptr<memory::Ledger> ledger_;
  static constexpr std::size_t kPasses = 16;  // that decide how many are kept
  struct Size {
    std::vector<Buffer> free;
    std::size_t in_use = 0;
    std::size_t most_in_use = 0;                // since the last end_pass()
    std::array<std::size_t, kPasses> recent{};  // by pass: the most in use
  };
  std::map<std::size_t, Size> sizes_;  // by bytes
  int allocations_ = 0;
  std::size_t passes_ = 0;
};

// Gradients whose memory their writer keeps until a stream has read them. Other work may use that
// memory afterwards: the compute stream waits for the reading before a gradient is let go.
// Ownership: shares the gradients' memory. Errors: DeviceError.
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

// Sends the gradients of one backward pass to the ranks that add them up, where collectives have an
// inbox. Each gradient goes there as soon as it has come, without a buffer of this rank. Some
// gradients cannot go at once: the sum of several, or one whose room in the inbox is still taken.
// They wait in the caller's buffer, and go when their unit is reduced.
//
// The first pass makes the inbox, with as many bytes as may be under way; they are charged as
// gradients. Ownership: owns the inbox. Errors: CommError; OutOfMemoryError when the inbox is made.
class GradientInbox {
 public:
  // `most`: of contributions under way; one more may be written meanwhile.
  GradientInbox(std::string name, std::vector<Unit>& units, comm::Collectives& collectives,
                device::Device& device, Bytes most);

  // A pass that reduces these units, in this order; `dtypes` by unit, of contributions. The same on
  // every rank. Where there is no inbox nothing is active.
  void begin_pass(std::span<const int> order, std::span<const DType> dtypes);
  void end_pass() { active_ = false; }
  // Frees the inbox, on every rank, after a barrier; the next pass makes another.
  void free();
  bool active() const { return active_; }

  // Whether a gradient may go to its place now.
  bool takes(int unit) const;
  void write(int unit, int slot, const std::byte* gradient);
  bool has(int unit, int slot) const { return nth(nth(progress_, unit).written, slot); }
  void write_zero(int unit, int slot);
  // Collective. Every slot was written.
  std::unique_ptr<comm::Work> reduce(int unit, const comm::Reduction& reduction);

 private:
  struct Progress {
    std::size_t index = 0;  // among the contributions of this pass
    DType dtype = DType::kFloat32;
    std::vector<bool> written;  // by slot
  };
  bool make(std::span<const Bytes> contributions);
  bool zero_padding(const plan::FlatLayout& layout, std::span<float> shard);

  std::string name_;
  std::vector<Unit>& units_;
  comm::Collectives& collectives_;
  device::Device& device_;
  Bytes most_;
  std::unique_ptr<comm::Inbox> inbox_;  // null: none yet, or none to be had
  Bytes bytes_;
  memory::Charge charge_;
  bool active_ = false;
  std::vector<Progress> progress_;  // by unit
};

}  // namespace strata::engine

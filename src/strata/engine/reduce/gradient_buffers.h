// The memory through which gradients go into their reduction: flat buffers of this rank that peers
// can read, and the inbox, into which ranks write each other's gradients.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/comm/inbox.h"
#include "strata/device/device.h"
#include "strata/engine/unit/unit.h"
#include "strata/memory/buffer_pool.h"
#include "strata/memory/ledger.h"

namespace strata::engine {

struct GradientBuffer {
  std::unique_ptr<comm::SharedBuffer> memory;
  memory::Charge charge;
  // The end of this rank's part of the reduction that reads the memory, if that part runs on a
  // stream; null: there is nothing to wait for.
  std::unique_ptr<device::Event> read = nullptr;

  std::span<std::byte> bytes() { return memory->local(); }
};

// A unit takes a buffer when its first gradient arrives, and gives it back when its reduction has
// ended. The number in use at once depends on when reductions end; so as many are kept as the
// busiest of the last passes used. The first pass does not count once there is another: its order
// is not known before, so it may need many more.
using GradientBuffers = memory::BufferPool<GradientBuffer>;

GradientBuffers make_gradient_buffers(const std::string& name, comm::Collectives& collectives,
                                      std::shared_ptr<memory::Ledger> ledger);

// Gradients whose memory their writer keeps until a stream has read them. Other work may use that
// memory afterwards: the compute stream waits for the reading before a gradient is let go.
// Ownership: shares the gradients' memory. Errors: DeviceError.
class HeldGradients {
 public:
  // `most`: bytes that are held at once; the newest gradient may exceed it.
  HeldGradients(device::Device& device, Bytes most) : device_(device), most_(most) {}

  // Until `reader` has done its present work. Without an owner the compute stream waits for that.
  void hold(std::shared_ptr<const void> owner, Bytes bytes, device::Stream& reader);
  // Lets go of all.
  void let_go() { let_go(Bytes()); }
  // The same where the host has waited for all streams.
  void forget() {
    held_.clear();
    bytes_ = Bytes();
  }

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

// Sends each gradient of a backward pass to the ranks that add it up as soon as it has come, where
// collectives have an inbox. The sum of several gradients, and one whose room in the inbox is still
// taken, wait in the caller's buffer until their unit is reduced.
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
  void free() {
    STRATA_ASSERT(!active_);
    inbox_.reset();
    charge_ = {};
  }
  bool active() const { return active_; }

  // Whether a gradient may go to its place now.
  bool takes(int unit) const { return active_ && inbox_->writable(nth(progress_, unit).index); }
  void write(int unit, int slot, const std::byte* gradient);  // null: zeroes
  bool has(int unit, int slot) const { return nth(nth(progress_, unit).written, slot); }
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

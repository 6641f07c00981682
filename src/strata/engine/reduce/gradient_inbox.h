// Sends the gradients of one backward pass to the ranks that add them up, where collectives have an
// inbox. Each gradient goes there as soon as it has come, without a buffer of this rank. Some
// gradients cannot go at once: the sum of several, or one whose room in the inbox is still taken.
// They wait in the caller's buffer, and go when their unit is reduced.
//
// The first pass makes the inbox, with as many bytes as may be under way; they are charged as
// gradients. Threads: one thread at a time. Ownership: owns the inbox. Errors: CommError;
// OutOfMemoryError when the inbox is made.
#pragma once

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
  bool has(int unit, int slot) const {
    return progress_[static_cast<std::size_t>(unit)].written[static_cast<std::size_t>(slot)];
  }
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

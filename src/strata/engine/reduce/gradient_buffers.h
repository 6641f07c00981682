// The memory through which gradients go into their reduction: flat buffers of this rank that peers
// can read, and the inbox, into which ranks write each other's gradients.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "strata/base/error.h"
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

  std::span<std::byte> bytes() { return memory->local(); }
};

// A unit takes a buffer when its first gradient arrives, and gives it back when its reduction has
// ended. The number in use at once depends on when reductions end; so as many are kept as the
// busiest of the last passes used. The first pass does not count once there is another: its order
// is not known before, so it may need many more.
using GradientBuffers = memory::BufferPool<GradientBuffer>;

inline GradientBuffers make_gradient_buffers(const std::string& name,
                                             comm::Collectives& collectives,
                                             std::shared_ptr<memory::Ledger> ledger) {
  constexpr std::size_t kPasses = 16;  // that decide how many buffers are kept
  const auto allocate = [name, &collectives, ledger = std::move(ledger),
                         made = 0](Bytes bytes) mutable {
    memory::Charge charge(ledger, memory::Tier::kDevice, memory::Kind::kGradients, bytes);
    auto memory = collectives.allocate(fmt::format("{}.gradients.{}", name, made++), bytes);
    return std::make_unique<GradientBuffer>(GradientBuffer{std::move(memory), std::move(charge)});
  };
  return GradientBuffers(allocate, kPasses);
}

// Gradients whose memory their writer keeps until a stream has read them. Other work may use that
// memory afterwards: the compute stream waits for the reading before a gradient is let go.
// Ownership: shares the gradients' memory. Errors: DeviceError.
class HeldGradients {
 public:
  // `most`: bytes that are held at once; the newest gradient may exceed it.
  HeldGradients(device::Device& device, Bytes most) : device_(device), most_(most) {}

  // Until `reader` has done its present work. Without an owner the compute stream waits for that.
  void hold(std::shared_ptr<const void> owner, Bytes bytes, device::Stream& reader) {
    if (owner == nullptr) {
      device_.compute_stream().wait_for(*reader.record());
      return;
    }
    let_go(std::max(most_ - bytes, Bytes()));
    held_.push_back({std::move(owner), bytes, reader.record()});
    bytes_ += bytes;
  }
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
  void let_go(Bytes most) {
    while (!held_.empty() && bytes_ > most) {
      device_.compute_stream().wait_for(*held_.front().read);
      bytes_ -= held_.front().bytes;
      held_.pop_front();
    }
  }

  device::Device& device_;
  Bytes most_;
  std::deque<Held> held_;
  Bytes bytes_;
};

// A reduction that is complete when its result's padding is zero, too.
class PaddedWork final : public comm::Work {
 public:
  PaddedWork(std::unique_ptr<comm::Work> work, std::unique_ptr<device::Event> padded,
             device::Device& device)
      : work_(std::move(work)), padded_(std::move(padded)), device_(device) {}

  bool done() override { return work_->done() && padded_->done(); }
  void wait() override {
    work_->wait();
    device_.compute_stream().wait_for(*padded_);
  }
  void wait_for_readers() override { work_->wait_for_readers(); }
  comm::WorkTimes times() const override { return work_->times(); }

 private:
  std::unique_ptr<comm::Work> work_;
  std::unique_ptr<device::Event> padded_;
  device::Device& device_;
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
                device::Device& device, Bytes most)
      : name_(std::move(name)),
        units_(units),
        collectives_(collectives),
        device_(device),
        most_(most),
        progress_(units.size()) {}

  // A pass that reduces these units, in this order; `dtypes` by unit, of contributions. The same on
  // every rank. Where there is no inbox nothing is active.
  void begin_pass(std::span<const int> order, std::span<const DType> dtypes) {
    active_ = false;
    std::vector<Bytes> contributions;
    for (const int unit : order) {
      const auto i = static_cast<std::size_t>(unit);
      const plan::FlatLayout& layout = units_[i].layout;
      progress_[i].index = contributions.size();
      progress_[i].dtype = dtypes[i];
      progress_[i].written.assign(layout.slots().size(), false);
      contributions.push_back(bytes_of(layout.padded(), dtypes[i]));
    }
    if (!make(contributions)) return;
    // Wider contributions than those it was made for: they go another way.
    if (std::ranges::any_of(contributions, [this](Bytes bytes) { return bytes > bytes_; })) return;
    inbox_->expect(contributions);
    active_ = true;
  }
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
  // `gradient` null: zeroes.
  void write(int unit, int slot, const std::byte* gradient) {
    Progress& p = nth(progress_, unit);
    const plan::Slot& place = nth(nth(units_, unit).layout.slots(), slot);
    if (gradient != nullptr) {
      const std::size_t bytes = bytes_of(place.numel, p.dtype).size();
      inbox_->write(p.index, place.offset, {gradient, bytes}, p.dtype);
    } else {
      inbox_->write_zero(p.index, place.offset, place.numel, p.dtype);
    }
    nth(p.written, slot) = true;
  }
  bool has(int unit, int slot) const { return nth(nth(progress_, unit).written, slot); }
  // Collective. Every slot was written.
  std::unique_ptr<comm::Work> reduce(int unit, const comm::Reduction& reduction) {
    const Progress& p = nth(progress_, unit);
    const Unit& u = nth(units_, unit);
    STRATA_ASSERT(std::ranges::find(p.written, false) == p.written.end());
    auto work = inbox_->reduce(p.index, reduction, u.name());
    if (!zero_padding(u.layout, reduction.result)) return work;
    return std::make_unique<PaddedWork>(std::move(work), reductions().record(), device_);
  }

 private:
  struct Progress {
    std::size_t index = 0;  // among the contributions of this pass
    DType dtype = DType::kFloat32;
    std::vector<bool> written;  // by slot
  };
  bool make(std::span<const Bytes> contributions) {
    if (inbox_ != nullptr) return true;
    if (!collectives_.traits().has_inbox) return false;
    Bytes all;
    Bytes largest;
    for (const Bytes bytes : contributions) {
      all += bytes;
      largest = std::max(largest, bytes);
    }
    bytes_ = std::min(most_ + largest, all);
    if (bytes_.value == 0) return false;
    charge_ =
        memory::Charge(device_.ledger(), memory::Tier::kDevice, memory::Kind::kGradients, bytes_);
    inbox_ = collectives_.make_inbox(fmt::format("{}.inbox", name_), bytes_);
    return true;
  }
  // No rank writes padding into an inbox, so the sum holds there whatever the inbox held before.
  // True: there is padding.
  bool zero_padding(const plan::FlatLayout& layout, std::span<float> shard) {
    Numel end;
    bool any = false;
    const auto zero = [&](Numel to) {
      if (end >= to) return;
      any = true;
      device_.fill_zero(std::as_writable_bytes(shard.subspan(end.size(), (to - end).size())),
                        reductions());
    };
    for (const plan::ShardRange& piece : layout.pieces(collectives_.shard_position().index)) {
      zero(piece.shard_offset);
      end = piece.shard_offset + (piece.param_end - piece.param_begin);
    }
    zero(layout.shard());
    return any;
  }

  device::Stream& reductions() { return *collectives_.stream(comm::Traffic::kReductions); }

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

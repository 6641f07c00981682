#include "strata/engine/reduce/gradient_buffers.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

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

}  // namespace

GradientBuffers make_gradient_buffers(const std::string& name, comm::Collectives& collectives,
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

void HeldGradients::hold(std::shared_ptr<const void> owner, Bytes bytes, device::Stream& reader) {
  if (owner == nullptr) {
    device_.compute_stream().wait_for(*reader.record());
    return;
  }
  let_go(std::max(most_ - bytes, Bytes()));
  held_.push_back({std::move(owner), bytes, reader.record()});
  bytes_ += bytes;
}

void HeldGradients::let_go(Bytes most) {
  while (!held_.empty() && bytes_ > most) {
    device_.compute_stream().wait_for(*held_.front().read);
    bytes_ -= held_.front().bytes;
    held_.pop_front();
  }
}

GradientInbox::GradientInbox(std::string name, std::vector<Unit>& units,
                             comm::Collectives& collectives, device::Device& device, Bytes most)
    : name_(std::move(name)),
      units_(units),
      collectives_(collectives),
      device_(device),
      most_(most),
      progress_(units.size()) {}

bool GradientInbox::make(std::span<const Bytes> contributions) {
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

void GradientInbox::begin_pass(std::span<const int> order, std::span<const DType> dtypes) {
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

void GradientInbox::write(int unit, int slot, const std::byte* gradient) {
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

std::unique_ptr<comm::Work> GradientInbox::reduce(int unit, const comm::Reduction& reduction) {
  const Progress& p = nth(progress_, unit);
  const Unit& u = nth(units_, unit);
  STRATA_ASSERT(std::ranges::find(p.written, false) == p.written.end());
  auto work = inbox_->reduce(p.index, reduction, u.name());
  if (!zero_padding(u.layout, reduction.result)) return work;
  return std::make_unique<PaddedWork>(std::move(work), collectives_.contribution_stream()->record(),
                                      device_);
}

// No rank writes padding into an inbox, so the sum holds there whatever the inbox held before.
// True: there is padding.
bool GradientInbox::zero_padding(const plan::FlatLayout& layout, std::span<float> shard) {
  Numel end;
  bool any = false;
  const auto zero = [&](Numel to) {
    if (end >= to) return;
    any = true;
    device_.fill_zero(std::as_writable_bytes(shard.subspan(end.size(), (to - end).size())),
                      *collectives_.contribution_stream());
  };
  for (const plan::ShardRange& piece : layout.pieces(collectives_.shard_position().index)) {
    zero(piece.shard_offset);
    end = piece.shard_offset + (piece.param_end - piece.param_begin);
  }
  zero(layout.shard());
  return any;
}

}  // namespace strata::engine

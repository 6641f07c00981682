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

GradientBuffers::Buffer GradientBuffers::take(Bytes bytes) {
  Size& size = sizes_[bytes.size()];
  Buffer buffer;
  if (!size.free.empty()) {
    buffer = std::move(size.free.back());
    size.free.pop_back();
  } else {
    buffer = std::make_unique<Allocation>();
    buffer->charge =
        memory::Charge(ledger_, memory::Tier::kDevice, memory::Kind::kGradients, bytes);
    buffer->memory =
        collectives_.allocate(fmt::format("{}.gradients.{}", name_, allocations_++), bytes);
  }
  size.most_in_use = std::max(size.most_in_use, ++size.in_use);
  return buffer;
}

void GradientBuffers::give_back(Buffer buffer) {
  if (buffer == nullptr) return;
  Size& size = sizes_[buffer->memory->local().size()];
  --size.in_use;
  size.free.push_back(std::move(buffer));
}

void GradientBuffers::free_unused() {
  for (auto& [bytes, size] : sizes_) size.free.clear();
}

void GradientBuffers::end_pass() {
  const bool first = passes_ == 0;
  for (auto& [bytes, size] : sizes_) {
    size.recent[passes_ % kPasses] = first ? 0 : size.most_in_use;
    const std::size_t most = first ? size.most_in_use : *std::ranges::max_element(size.recent);
    const std::size_t keep = most - std::min(most, size.in_use);
    if (size.free.size() > keep) size.free.resize(keep);
    size.most_in_use = size.in_use;
  }
  ++passes_;
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

void HeldGradients::forget() {
  held_.clear();
  bytes_ = Bytes();
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

void GradientInbox::free() {
  STRATA_ASSERT(!active_);
  inbox_.reset();
  charge_ = {};
}

bool GradientInbox::takes(int unit) const {
  return active_ && inbox_->writable(nth(progress_, unit).index);
}

void GradientInbox::write(int unit, int slot, const std::byte* gradient) {
  const auto i = static_cast<std::size_t>(unit);
  Progress& p = progress_[i];
  const plan::Slot& place = units_[i].layout.slots()[static_cast<std::size_t>(slot)];
  inbox_->write(p.index, place.offset, {gradient, bytes_of(place.numel, p.dtype).size()}, p.dtype);
  nth(p.written, slot) = true;
}

void GradientInbox::write_zero(int unit, int slot) {
  const auto i = static_cast<std::size_t>(unit);
  Progress& p = progress_[i];
  const plan::Slot& place = units_[i].layout.slots()[static_cast<std::size_t>(slot)];
  inbox_->write_zero(p.index, place.offset, place.numel, p.dtype);
  nth(p.written, slot) = true;
}

std::unique_ptr<comm::Work> GradientInbox::reduce(int unit, const comm::Reduction& reduction) {
  const auto i = static_cast<std::size_t>(unit);
  STRATA_ASSERT(std::ranges::all_of(progress_[i].written, [](bool written) { return written; }));
  auto work = inbox_->reduce(progress_[i].index, reduction, units_[i].name());
  if (!zero_padding(units_[i].layout, reduction.result)) return work;
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

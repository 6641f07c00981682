#include "strata/torch/host_intake.h"

#include <algorithm>
#include <cstring>

#include "strata/base/error.h"
#include "strata/kernels/fingerprint.h"
#include "strata/torch/dtype.h"

namespace strata::torch {
namespace {

// One buffer is filled while the link drains those before it; filling is the faster of the two.
constexpr engine::StagingOptions kRing{4, 32_MiB};
constexpr Bytes kAlignment = 256_B;  // at which values of a parameter begin in a buffer

}  // namespace

HostIntake::HostIntake(engine::Engine& engine, ThreadPool& threads, Comparison* comparison,
                       engine::InitReport::Phase& phase)
    : engine_(engine), threads_(threads), comparison_(comparison), phase_(phase) {}

void HostIntake::add(int param, Numel begin, const at::Tensor& values) {
  STRATA_ASSERT(values.is_cpu() && values.is_contiguous());
  const int world = engine_.collectives().world_size();
  const bool replicated = engine_.collectives().shard_place().groups > 1;
  complete_ = complete_ && !(engine_.weights().unit_of(param).whole && world > 1);
  const bool compares = comparison_ != nullptr && comparison_->wanted();
  STRATA_ASSERT(!compares || begin == Numel());
  const DType dtype = from_scalar_type(values.scalar_type());
  const auto* const data = static_cast<const std::byte*>(values.const_data_ptr());
  const auto [first, last] = engine_.weights().owned_range(param);
  const Numel end = begin + Numel(values.numel());
  const Numel most(kBlock / size_of(dtype));
  std::size_t index = 0;
  for (Numel at = begin; at < end; at += most, ++index) {
    const Numel stop = std::min(at + most, end);
    const Numel low = std::max(at, first);
    const Numel high = std::min(stop, last);
    const bool kept = low < high;
    // Of what rank 0 alone keeps, nobody asks whether it is what rank 0 has.
    const bool alone = low == at && high == stop && !replicated;
    Block block{};
    const auto bytes_from = [&](Numel from, Numel to) {
      return std::span(data + bytes_of(from - begin, dtype).size(),
                       bytes_of(to - from, dtype).size());
    };
    block.bytes = bytes_from(at, stop);
    if (compares && (comparison_->is_reference() ? !alone : kept))
      block.fingerprint = comparison_->place_for(param, index, 1).data();
    if (kept) {
      block.kept = bytes_from(low, high);
      keep(param, low, high - low, block, dtype);
    } else if (block.fingerprint != nullptr) {
      later_.push_back(block);
    }
  }
}

void HostIntake::keep(int param, Numel begin, Numel count, const Block& block, DType dtype) {
  const Bytes bytes(block.kept.size());
  bool goes_on = !stores_.empty() && stores_.back().param == param &&
                 stores_.back().begin + stores_.back().count == begin;
  std::byte* const target = take_room(bytes, goes_on);
  goes_on = goes_on && !stores_.empty();  // else a new buffer was begun
  blocks_.push_back(block);
  blocks_.back().target = target;
  if (goes_on) {
    stores_.back().count += count;
  } else {
    stores_.push_back({param, begin, count, target, dtype});
  }
}

std::byte* HostIntake::take_room(Bytes bytes, bool goes_on) {
  Bytes at = goes_on ? used_ : align_up(used_, kAlignment);
  if (!buffer_.empty() && at + bytes > Bytes(buffer_.size())) {
    run();
    at = Bytes();
  }
  if (buffer_.empty()) {
    if (!ring_) ring_.emplace(kRing, engine_.device());
    while (!later_.empty() && !ring_->ready(turn_)) {
      take_later(2 * thread_count());
      work_on_all();
    }
    buffer_ = ring_->buffer(turn_);
  }
  used_ = at + bytes;
  return buffer_.data() + at.size();
}

void HostIntake::run() {
  take_later(thread_count());  // for threads that find no block of the buffer any more
  work_on_all();
  for (const Store& store : stores_) {
    engine_.weights().enqueue_store(store.param, store.begin, store.count, store.source,
                                    store.dtype);
    phase_.moved(bytes_of(store.count, store.dtype));
  }
  stores_.clear();
  ring_->used_until(turn_, engine_.device().compute_stream().record());
  ++turn_;
  buffer_ = {};
  used_ = Bytes();
}

std::size_t HostIntake::thread_count() const {
  return static_cast<std::size_t>(threads_.threads());
}

void HostIntake::take_later(std::size_t most) {
  const auto stop = later_.begin() + static_cast<std::ptrdiff_t>(std::min(later_.size(), most));
  blocks_.insert(blocks_.end(), later_.begin(), stop);
  later_.erase(later_.begin(), stop);
}

void HostIntake::work_on_all() {
  threads_.parallel_for(static_cast<std::int64_t>(blocks_.size()), 1,
                        [&](std::int64_t begin, std::int64_t end) {
                          for (std::int64_t i = begin; i < end; ++i)
                            work_on(blocks_[static_cast<std::size_t>(i)]);
                        });
  blocks_.clear();
}

void HostIntake::work_on(const Block& block) {
  kernels::Fingerprint sums;
  if (block.kept.empty()) {
    sums = kernels::fingerprint(block.bytes, nullptr);
  } else {
    sums = kernels::fingerprint_and_copy(block.target, block.kept);
    const bool all = block.kept.size() == block.bytes.size();
    if (!all && block.fingerprint != nullptr) sums = kernels::fingerprint(block.bytes, nullptr);
  }
  if (block.fingerprint != nullptr) std::memcpy(block.fingerprint, &sums, sizeof(sums));
}

void HostIntake::flush() {
  if (!buffer_.empty()) run();
  take_later(later_.size());
  work_on_all();
}

}  // namespace strata::torch

// Where a gradient goes when it comes: to the ranks that add it up, or into its unit's buffer.
#include <algorithm>
#include <utility>

#include "strata/base/error.h"
#include "strata/engine/reduce/reducer.h"

namespace strata::engine {

device::Stream& Reducer::writes() {
  written_ = true;
  return writes_ != nullptr ? *writes_ : device_.compute_stream();
}

void Reducer::writes_follow_compute() {
  if (writes_ != nullptr) writes_->wait_for(*device_.compute_stream().record());
}

void Reducer::compute_follows_writes() {
  let_go(Bytes());
  // What the stream holds of others' is not waited for in vain.
  if (std::exchange(written_, false) && writes_ != nullptr)
    device_.compute_stream().wait_for(*writes_->record());
}

void Reducer::let_go(Bytes most) {
  while (!kept_gradients_.empty() && kept_bytes_ > most) {
    device_.compute_stream().wait_for(*kept_gradients_.front().written);
    kept_bytes_ -= kept_gradients_.front().bytes;
    kept_gradients_.pop_front();
  }
}

void Reducer::open(int unit) {
  Progress& p = progress(unit);
  const plan::FlatLayout& layout = units_[static_cast<std::size_t>(unit)].layout;
  const DType dtype = buffer_dtype(unit);
  const Bytes wanted = buffer_bytes(unit);
  // Here, and not where a reduction starts: until another buffer is needed it may take its time.
  free_buffers(std::max(options_.max_reducing - wanted, Bytes()));
  p.buffer = buffers_.take(wanted);
  writes_follow_compute();
  std::fill(p.written.begin(), p.written.end(), false);
  // Padding is never written by a gradient; it must be zero, since it takes part in the reduction.
  const std::span<std::byte> bytes = p.buffer->memory->local();
  const auto zero = [&](Numel begin, Numel end) {
    const std::size_t from = bytes_of(begin, dtype).size();
    device_.fill_zero(bytes.subspan(from, bytes_of(end, dtype).size() - from), writes());
  };
  Numel end;
  for (const plan::Slot& slot : layout.slots()) {
    if (slot.offset > end) zero(end, slot.offset);
    end = slot.end();
  }
  if (layout.padded() > end) zero(end, layout.padded());
}

void Reducer::add(int unit, int slot_index, const std::byte* gradient, DType dtype,
                  std::shared_ptr<const void> keep) {
  Progress& p = progress(unit);
  const auto index = static_cast<std::size_t>(slot_index);
  const plan::Slot& slot = units_[static_cast<std::size_t>(unit)].layout.slots()[index];
  if (!push(unit, slot_index, gradient, dtype)) {
    if (p.buffer == nullptr) open(unit);
    writes_follow_compute();
    const DType kept_as = buffer_dtype(unit);
    std::byte* target = p.buffer->memory->local().data() + bytes_of(slot.offset, kept_as).size();
    if (p.written[index]) {
      device_.accumulate(target, kept_as, gradient, dtype, slot.numel, writes());
    } else {
      device_.cast(target, kept_as, gradient, dtype, slot.numel, writes());
      p.written[index] = true;
    }
  }
  keep_until_written(std::move(keep), bytes_of(slot.numel, dtype));
  // Whoever pulls is the rank that works: without a look at what is pending, peers would wait for
  // ours.
  if (!pending_.empty()) pending_.back().work->done();
  if (++p.seen[index] > p.expected[index] || p.reduced) return;
  if (--p.missing > 0) return;
  completion_.push_back(unit);
  p.waiting = true;
  waiting_bytes_ += buffer_bytes(unit);
  if (reducing_) try_reduce();
}

// Straight to where it is added up, if it is all that this pass is known to bring there.
bool Reducer::push(int unit, int slot, const std::byte* gradient, DType dtype) {
  const Progress& p = progress(unit);
  const auto index = static_cast<std::size_t>(slot);
  if (!inbox_.takes(unit) || p.reduced || p.expected[index] > 1 || p.seen[index] > 0 ||
      dtype != buffer_dtype(unit)) {
    return false;
  }
  writes_follow_compute();
  written_ = true;
  inbox_.write(unit, slot, gradient);
  return true;
}

void Reducer::keep_until_written(std::shared_ptr<const void> keep, Bytes bytes) {
  if (writes_ == nullptr) return;
  if (keep == nullptr) {
    device_.compute_stream().wait_for(*writes_->record());
    return;
  }
  let_go(std::max(options_.max_kept - bytes, Bytes()));
  kept_gradients_.push_back({std::move(keep), bytes, writes_->record()});
  kept_bytes_ += bytes;
}

void Reducer::note_unused(int unit, std::size_t slot) {
  const plan::Slot& s = units_[static_cast<std::size_t>(unit)].layout.slots()[slot];
  if (unused_param_ < 0 && s.numel.value > 0 && !progress(unit).reduced) unused_param_ = s.param;
}

void Reducer::fill_what_is_missing(int unit) {
  Progress& p = progress(unit);
  const DType dtype = buffer_dtype(unit);
  if (p.buffer == nullptr) open(unit);
  for (std::size_t i = 0; i < p.written.size(); ++i) {
    if (p.written[i]) continue;
    note_unused(unit, i);
    const plan::Slot& slot = units_[static_cast<std::size_t>(unit)].layout.slots()[i];
    device_.fill_zero(p.buffer->memory->local().subspan(bytes_of(slot.offset, dtype).size(),
                                                        bytes_of(slot.numel, dtype).size()),
                      writes());
  }
}

// From the buffer what lies there; what is there of a gradient that went already came late.
void Reducer::push_what_is_missing(int unit) {
  Progress& p = progress(unit);
  const plan::FlatLayout& layout = units_[static_cast<std::size_t>(unit)].layout;
  writes_follow_compute();  // which may have read the shard that is written next
  for (std::size_t i = 0; i < layout.slots().size(); ++i) {
    const auto slot = static_cast<int>(i);
    if (inbox_.has(unit, slot)) continue;
    if (p.buffer != nullptr && p.written[i]) {
      const Bytes at = bytes_of(layout.slots()[i].offset, buffer_dtype(unit));
      inbox_.write(unit, slot, p.buffer->memory->local().data() + at.size());
      p.written[i] = false;
    } else {
      note_unused(unit, i);
      inbox_.write_zero(unit, slot);
    }
  }
  written_ = true;
}

// Nobody writes it into an inbox, where it is whatever lay there before.
void Reducer::zero_padding(int unit, std::span<float> shard) {
  const plan::FlatLayout& layout = units_[static_cast<std::size_t>(unit)].layout;
  Numel end;
  const auto zero = [&](Numel to) {
    if (end < to)
      device_.fill_zero(std::as_writable_bytes(shard.subspan(end.size(), (to - end).size())),
                        *collectives_.contribution_stream());
  };
  for (const plan::ShardPiece& piece : layout.pieces(collectives_.shard_place().index)) {
    zero(piece.shard_offset);
    end = piece.shard_offset + (piece.param_end - piece.param_begin);
  }
  zero(layout.shard());
}

}  // namespace strata::engine

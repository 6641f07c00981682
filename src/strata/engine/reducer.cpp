#include "strata/engine/reducer.h"

#include <algorithm>
#include <utility>

#include "strata/base/error.h"

namespace strata::engine {

Reducer::Reducer(std::vector<Unit>& units, comm::Collectives& collectives, device::Device& device,
                 StepRecorder& recorder, ReducerOptions options)
    : units_(units),
      collectives_(collectives),
      device_(device),
      recorder_(recorder),
      options_(options),
      buffers_(options.name, collectives, device.ledger()),
      shards_(units, device, options.accumulation_dtype),
      progress_(units.size()),
      writes_(device.runs_ahead() ? collectives.contribution_stream() : nullptr),
      adds_up_later_(collectives.shard_place().groups > 1 &&
                     options.accumulation_dtype == DType::kFloat32),
      of_group_(units.size()) {
  if (device.runs_ahead() && writes_ == nullptr) {
    own_writes_ = device.create_stream();
    writes_ = own_writes_.get();
  }
  for (const Unit& unit : units_) {
    const std::size_t slots = unit.trainable() ? unit.layout.slots().size() : 0;
    Progress& p = progress(unit.id);
    p.expected.assign(slots, 1);
    p.seen.assign(slots, 0);
    p.written.assign(slots, false);
    if (unit.trainable()) waiting_max_ = std::max(waiting_max_, buffer_bytes(unit.id));
  }
  waiting_max_ += options_.max_reducing;
}

Reducer::~Reducer() = default;

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

// The same on every rank: it depends on the passes alone, not on what this rank got in them.
DType Reducer::buffer_dtype(int unit) const {
  const DType own = units_[static_cast<std::size_t>(unit)].layout.dtype();
  const bool exact = !kept_ && collectives_.sums_in_fp32() && is_floating(own) &&
                     size_of(own) < size_of(options_.reduce_dtype);
  return exact ? own : options_.reduce_dtype;
}

// What has come too late for its reduction is widened, as what comes from now on is.
void Reducer::keep_for_later_passes() {
  if (kept_) return;
  compute_follows_writes();
  for (const int unit : order_) {
    Progress& p = progress(unit);
    if (p.buffer == nullptr) continue;
    const DType before = buffer_dtype(unit);
    kept_ = true;
    const DType after = buffer_dtype(unit);
    if (after != before) {
      auto wide = buffers_.take(buffer_bytes(unit));
      device_.cast(wide->memory->local().data(), after, p.buffer->memory->local().data(), before,
                   units_[static_cast<std::size_t>(unit)].layout.padded(),
                   device_.compute_stream());
      buffers_.give_back(std::exchange(p.buffer, std::move(wide)));
    }
    kept_ = false;
  }
  kept_ = true;
}

void Reducer::begin_backward(bool reduce, std::span<const int> first_uses, bool last) {
  reducing_ = reduce;
  last_ = last;
  if (!reduce) keep_for_later_passes();
  next_ = 0;
  waiting_bytes_ = Bytes();
  completion_.clear();
  if (order_.empty()) {
    std::vector<int> order(first_uses.rbegin(), first_uses.rend());
    for (std::size_t i = units_.size(); i-- > 0;) order.push_back(static_cast<int>(i));
    agree_on_order(std::move(order));
  }
  for (const int unit : order_) {
    Progress& p = progress(unit);
    std::fill(p.seen.begin(), p.seen.end(), 0);
    p.missing = 0;
    for (const int expected : p.expected) p.missing += expected;
    p.waiting = false;
    p.reduced = false;
    if (p.missing == 0) completion_.push_back(unit);
  }
}

// Rank 0's order counts; first occurrences of trainable units, so the list may hold others and
// repeat.
void Reducer::agree_on_order(std::vector<int> order) {
  std::vector<bool> placed(units_.size());
  order_.clear();
  for (const int unit : order) {
    const auto index = static_cast<std::size_t>(unit);
    if (placed[index] || !units_[index].trainable()) continue;
    placed[index] = true;
    order_.push_back(unit);
  }
  collectives_.broadcast(std::as_writable_bytes(std::span<int>(order_)), 0);
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
  if (writes_ != nullptr && keep != nullptr) {
    const Bytes bytes = bytes_of(slot.numel, dtype);
    let_go(std::max(options_.max_kept - bytes, Bytes()));
    kept_gradients_.push_back({std::move(keep), bytes, writes_->record()});
    kept_bytes_ += bytes;
  } else if (writes_ != nullptr) {
    device_.compute_stream().wait_for(*writes_->record());
  }
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

void Reducer::try_reduce() {
  while (next_ < order_.size()) {
    const int unit = order_[next_];
    if (progress(unit).missing > 0) {
      if (waiting_bytes_ <= waiting_max_) return;
      completion_.push_back(unit);  // it has waited for a gradient that may never come
    }
    ++next_;
    start_reduction(unit);
  }
}

void Reducer::start_reduction(int unit) {
  Progress& p = progress(unit);
  const Unit& u = units_[static_cast<std::size_t>(unit)];
  const DType dtype = buffer_dtype(unit);
  if (p.buffer == nullptr) open(unit);
  for (std::size_t i = 0; i < p.written.size(); ++i) {
    if (p.written[i]) continue;
    const plan::Slot& slot = u.layout.slots()[i];
    if (unused_param_ < 0 && slot.numel.value > 0 && !p.reduced) unused_param_ = slot.param;
    device_.fill_zero(p.buffer->memory->local().subspan(bytes_of(slot.offset, dtype).size(),
                                                        bytes_of(slot.numel, dtype).size()),
                      writes());
  }
  const Bytes bytes = buffer_bytes(unit);
  if (std::exchange(p.waiting, false)) waiting_bytes_ -= bytes;
  const GradientShards::Target target = shards_.begin(unit);
  comm::Reduction reduction;
  reduction.source = p.buffer->memory.get();
  reduction.dtype = dtype;
  reduction.result = target.result;
  reduction.accumulate = target.accumulate;
  reduction.replicas = replicas_of(unit);
  reduction.scale = options_.sum ? 1.0F : 1.0F / static_cast<float>(collectives_.world_size());
  auto recording = recorder_.begin_transfer(Activity::kReduce, unit, bytes);
  reduction.writer = writes_;
  auto work = collectives_.reduce_scatter(reduction, u.name());
  device::Stream* const stream = collectives_.contribution_stream();
  if (options_.measures && last_ && stream != nullptr) shards_.measure(unit, *stream);
  recorder_.started(recording, *work);
  ++recorder_.counts().reductions;
  recorder_.counts().reduced += bytes;
  p.reduced = true;
  pending_bytes_ += bytes;
  pending_.push_back({unit, std::move(p.buffer), std::move(work), std::move(recording)});
}

// Depends on the passes alone, so that it is the same on every rank.
comm::Replicas Reducer::replicas_of(int unit) {
  if (!adds_up_later_) return comm::Replicas::kSum;
  const auto index = static_cast<std::size_t>(unit);
  const bool of_group = of_group_[index];
  of_group_[index] = !last_;
  if (!last_) return comm::Replicas::kLater;
  return of_group ? comm::Replicas::kSumAll : comm::Replicas::kSum;
}

void Reducer::free_buffers(Bytes at_most) {
  for (Pending& pending : pending_) {
    if (pending_bytes_ <= at_most) break;
    if (pending.buffer == nullptr) continue;
    recorder_.measure(Activity::kReduceWait, pending.unit,
                      [&] { pending.work->wait_for_readers(); });
    pending_bytes_ -= Bytes(pending.buffer->memory->local().size());
    buffers_.give_back(std::move(pending.buffer));
  }
  while (!pending_.empty() && pending_.front().buffer == nullptr && pending_.front().work->done()) {
    settle(pending_.front());
    pending_.pop_front();
  }
}

void Reducer::settle(Pending& pending) {
  recorder_.measure(Activity::kReduceWait, pending.unit, [&] { pending.work->wait(); });
  recorder_.end(pending.recording);
  shards_.settle(pending.unit);
}

void Reducer::finish_reductions() {
  free_buffers(Bytes());
  for (Pending& pending : pending_) settle(pending);
  pending_.clear();
}

void Reducer::end_backward() {
  if (!reducing_) {
    compute_follows_writes();
    return;
  }
  while (next_ < order_.size()) start_reduction(order_[next_++]);
  finish_reductions();
  compute_follows_writes();
  buffers_.end_pass();
  kept_ = false;
  learn();
}

void Reducer::learn() {
  ++passes_;
  for (const int unit : order_) {
    Progress& p = progress(unit);
    for (std::size_t i = 0; i < p.expected.size(); ++i) {
      // After the first pass a parameter that got nothing is not waited for; later, the most ever
      // seen.
      p.expected[i] = passes_ == 1 ? p.seen[i] : std::max(p.expected[i], p.seen[i]);
    }
  }
  if (passes_ > 1) return;
  std::vector<int> order = completion_;
  order.insert(order.end(), order_.begin(), order_.end());
  agree_on_order(std::move(order));
}

void Reducer::abandon_backward() {
  for (Pending& pending : pending_) {
    pending.work.reset();  // waits, drops its error
    buffers_.give_back(std::move(pending.buffer));
  }
  pending_.clear();
  pending_bytes_ = Bytes();
  drop_gradients();
}

void Reducer::drop_gradients() {
  compute_follows_writes();
  for (Progress& p : progress_) buffers_.give_back(std::move(p.buffer));
  shards_.clear();
  of_group_.assign(units_.size(), false);
}

std::vector<int> Reducer::late_units() const {
  std::vector<int> result;
  for (const int unit : order_) {
    if (progress_[static_cast<std::size_t>(unit)].buffer != nullptr) result.push_back(unit);
  }
  return result;
}

void Reducer::reduce_late(std::span<const int> units) {
  for (const int unit : units) start_reduction(unit);
  finish_reductions();
}

void Reducer::complete_groups() {
  last_ = true;
  std::vector<int> units;
  for (const int unit : order_) {
    if (of_group_[static_cast<std::size_t>(unit)]) units.push_back(unit);
  }
  if (!units.empty()) reduce_late(units);
}

}  // namespace strata::engine

#include "strata/engine/reduce/reducer.h"

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
      inbox_(options.name, units, collectives, device.ledger(), options.max_reducing),
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
  begin_pushes();
}

// Depends on the passes alone, so that it is the same on every rank.
void Reducer::begin_pushes() {
  inbox_.end_pass();
  // Narrow sums arrive wide, in memory of their own, which only buffers keep few of.
  if (!reducing_ || kept_ || options_.accumulation_dtype != DType::kFloat32) return;
  std::vector<DType> dtypes(units_.size());
  for (const int unit : order_) dtypes[static_cast<std::size_t>(unit)] = buffer_dtype(unit);
  inbox_.begin_pass(order_, dtypes);
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
  const bool pushes = inbox_.active() && !p.reduced;
  if (pushes) {
    push_what_is_missing(unit);
  } else {
    fill_what_is_missing(unit);
  }
  const Bytes bytes = buffer_bytes(unit);
  if (std::exchange(p.waiting, false)) waiting_bytes_ -= bytes;
  const GradientShards::Target target = shards_.begin(unit);
  comm::Reduction reduction;
  reduction.source = pushes ? nullptr : p.buffer->memory.get();
  reduction.dtype = buffer_dtype(unit);
  reduction.result = target.result;
  reduction.accumulate = target.accumulate;
  reduction.replicas = replicas_of(unit);
  reduction.scale = options_.sum ? 1.0F : 1.0F / static_cast<float>(collectives_.world_size());
  auto recording = recorder_.begin_transfer(Activity::kReduce, unit, bytes);
  reduction.writer = writes_;
  auto work =
      pushes ? inbox_.reduce(unit, reduction) : collectives_.reduce_scatter(reduction, u.name());
  if (pushes) zero_padding(unit, target.result);
  device::Stream* const stream = collectives_.contribution_stream();
  if (options_.measures && last_ && stream != nullptr) shards_.measure(unit, *stream);
  recorder_.started(recording, *work);
  ++recorder_.counts().reductions;
  recorder_.counts().reduced += bytes;
  p.reduced = true;
  GradientBuffers::Buffer buffer;
  if (!pushes || std::ranges::find(p.written, true) == p.written.end())
    buffer = std::move(p.buffer);  // else it holds what came late
  if (buffer != nullptr) pending_bytes_ += bytes;
  pending_.push_back({unit, std::move(buffer), std::move(work), std::move(recording)});
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
  inbox_.end_pass();
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
  inbox_.end_pass();
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

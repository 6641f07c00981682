#include "strata/comm/combined/replica_sums.h"

#include <fmt/core.h>

#include <utility>

#include "strata/base/error.h"

namespace strata::comm {
namespace {

std::span<float> floats(SharedBuffer& buffer, Numel begin, Numel numel) {
  return {reinterpret_cast<float*>(buffer.local().data()) + begin.size(), numel.size()};
}

}  // namespace

ReplicaSums::ReplicaSums(Collectives& inside, Collectives& across, device::Device& device,
                         bool owns_part)
    : inside_(inside),
      across_(across),
      device_(device),
      owns_part_(owns_part),
      replicas_read_each_other_(across.traits().one_sided && across.traits().deterministic),
      replicas_(across.world_size()) {}

Numel ReplicaSums::part_of(Numel numel) const {
  return Numel((numel.value + replicas_ - 1) / replicas_);
}

std::unique_ptr<ReplicaSums::Scratch> ReplicaSums::take(Numel numel) {
  auto& free = free_[numel.value];
  if (!free.empty()) {
    auto scratch = std::move(free.back());
    free.pop_back();
    return scratch;
  }
  auto scratch = std::make_unique<Scratch>();
  const int number = scratches_++;
  const auto allocate = [&](const char* what, Numel elements) {
    return across_.allocate(fmt::format("replicas.{}.{}", what, number),
                            bytes_of(elements, DType::kFloat32));
  };
  // The padding of the last part is zero and stays zero.
  const Numel parts = part_of(numel) * replicas_;
  scratch->terms = allocate("terms", gathers() ? parts : numel * replicas_);
  if (gathers()) scratch->sums = allocate("sums", parts);
  return scratch;
}

ReplicaSums::Started ReplicaSums::start(const Reduction& reduction, std::string_view tag) {
  STRATA_ASSERT(reduction.replicas != Replicas::kSumAll || reduction.accumulate);
  STRATA_ASSERT(reduction.replicas == Replicas::kSum || !owns_part_);
  for (Pending& pending : pending_) advance(pending);
  drop_complete();
  Pending next;
  next.number = next_;
  next.reduction = reduction;
  next.tag = std::string(tag);
  Reduction own = reduction;
  if (reduction.replicas == Replicas::kSum) {
    const Numel numel(reduction.result.size());
    next.scratch = take(numel);
    own.result = floats(*next.scratch->terms, Numel(), inside_of(numel));
    own.accumulate = false;
    // The scratch may be one that replicas have read until now, as the compute stream knows.
    if (own.writer != nullptr) own.writer->wait_for(*device_.compute_stream().record());
  }
  next.work = inside_.reduce_scatter(own, tag);
  const WorkTimes times = next.work->times();
  pending_.push_back(std::move(next));
  return {next_++, times};
}

void ReplicaSums::advance(Pending& pending) {
  if (pending.step == Step::kComplete) return;
  pending.work->wait();
  switch (pending.step) {
    case Step::kInside:
      if (pending.reduction.replicas == Replicas::kLater || pending.reduction.result.empty()) {
        pending.step = Step::kComplete;
      } else {
        begin_sum(pending);
      }
      return;
    case Step::kSumming:
      if (gathers()) {
        begin_gather(pending);
      } else {
        pending.step = Step::kComplete;
      }
      return;
    case Step::kGathering:
      fold(pending);
      pending.step = Step::kComplete;
      return;
    case Step::kComplete:
      return;
  }
}

void ReplicaSums::begin_sum(Pending& pending) {
  const Reduction& reduction = pending.reduction;
  const Numel numel(reduction.result.size());
  if (pending.scratch == nullptr) pending.scratch = take(numel);
  SharedBuffer& terms = *pending.scratch->terms;
  device::Stream& stream = device_.compute_stream();
  const auto slice = std::as_writable_bytes(floats(terms, Numel(), numel));
  if (reduction.replicas == Replicas::kSumAll)
    device_.copy(slice, std::as_bytes(reduction.result), stream);
  Reduction sum;
  sum.source = &terms;
  if (owns_part_) {
    sum.result = reduction.result;
    sum.accumulate = reduction.accumulate;
  } else if (replicas_read_each_other_) {
    // Every replica's slice of the contribution is all of it: each of them adds up the same.
    for (int replica = 1; replica < replicas_; ++replica) {
      device_.copy(std::as_writable_bytes(floats(terms, numel * replica, numel)), slice, stream);
    }
    sum.result = reduction.result;
    sum.accumulate = reduction.accumulate && reduction.replicas == Replicas::kSum;
  } else {
    const Numel part = part_of(numel);
    sum.result = floats(*pending.scratch->sums, part * across_.rank(), part);
  }
  pending.step = Step::kSumming;
  pending.work = across_.reduce_scatter(sum, pending.tag);
}

void ReplicaSums::begin_gather(Pending& pending) {
  SharedBuffer& sums = *pending.scratch->sums;
  const Bytes part = bytes_of(part_of(Numel(pending.reduction.result.size())), DType::kFloat32);
  pending.step = Step::kGathering;
  pending.work = across_.all_gather({&sums, Bytes(), part, part}, sums.local(), pending.tag);
}

void ReplicaSums::fold(Pending& pending) {
  const Reduction& reduction = pending.reduction;
  const std::span<std::byte> target = std::as_writable_bytes(reduction.result);
  const std::span<const std::byte> sum =
      pending.scratch->sums->local().first(reduction.result.size_bytes());
  device::Stream& stream = device_.compute_stream();
  if (reduction.accumulate && reduction.replicas == Replicas::kSum) {
    device_.accumulate(target.data(), DType::kFloat32, sum.data(), DType::kFloat32,
                       Numel(reduction.result.size()), stream);
  } else {
    device_.copy(target, sum, stream);
  }
}

void ReplicaSums::drop_complete() {
  while (!pending_.empty() && pending_.front().step == Step::kComplete) {
    Pending& first = pending_.front();
    if (first.scratch != nullptr) {
      free_[static_cast<std::int64_t>(first.reduction.result.size())].push_back(
          std::move(first.scratch));
    }
    pending_.pop_front();
  }
}

ReplicaSums::Pending* ReplicaSums::find(std::uint64_t number) {
  if (complete(number)) return nullptr;
  return &pending_[number - pending_.front().number];
}

bool ReplicaSums::complete(std::uint64_t number) const {
  if (pending_.empty() || number < pending_.front().number) return true;
  return pending_[number - pending_.front().number].step == Step::kComplete;
}

bool ReplicaSums::poll(std::uint64_t number) {
  for (const Pending& pending : pending_) {
    if (pending.work != nullptr) pending.work->done();
  }
  return complete(number);
}

void ReplicaSums::wait_for_readers(std::uint64_t number) {
  Pending* pending = find(number);
  if (pending != nullptr && pending->step == Step::kInside) pending->work->wait();
}

// A sum across begins when the gather before it has; only its end may come later.
void ReplicaSums::finish(std::uint64_t number) {
  for (Pending& pending : pending_) {
    if (pending.number > number) break;
    while (pending.step < Step::kGathering) advance(pending);
  }
  for (Pending& pending : pending_) {
    if (pending.number > number) break;
    advance(pending);
  }
  drop_complete();
}

void ReplicaSums::finish_all() {
  if (next_ > 0) finish(next_ - 1);
}

}  // namespace strata::comm

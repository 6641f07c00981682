#include "strata/comm/host/reduction_queue.h"

#include <fmt/core.h>

#include <exception>
#include <utility>

#include "strata/base/error.h"
#include "strata/kernels/elementwise.h"

namespace strata::comm {
namespace {

Bytes slice_bytes(const Reduction& reduction) {
  return bytes_of(Numel(reduction.result.size()), reduction.dtype);
}

bool can_sum(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

void check_arguments(const Reduction& reduction, std::string_view tag) {
  if (reduction.source == nullptr) {
    throw UsageError(fmt::format("reduce_scatter needs a source buffer ('{}' has none)", tag));
  }
  if (!can_sum(reduction.dtype)) {
    throw UsageError(fmt::format(
        "reduce_scatter sums float32, bfloat16 and float16: convert the source first ('{}' is {})",
        tag, name_of(reduction.dtype)));
  }
}

void check_bounds(const Reduction& reduction, const BufferView& own, int world_size,
                  std::string_view tag) {
  const Bytes wanted = slice_bytes(reduction) * world_size;
  const Bytes size(own.bytes.size());
  if (reduction.source_offset < Bytes(0) || reduction.source_offset + wanted > size) {
    throw UsageError(
        fmt::format("reduce_scatter of '{}' reads past its source '{}' (offset {}, {} slices of {} "
                    "B, buffer of {} B)",
                    tag, reduction.source->name(), reduction.source_offset.value, world_size,
                    slice_bytes(reduction).value, size.value));
  }
}

}  // namespace

std::uint64_t ReductionQueue::start(const Reduction& reduction, std::string_view tag) {
  check_arguments(reduction, tag);
  OperationEntry entry;
  entry.kind = OperationKind::kReduceScatter;
  entry.detail = static_cast<std::uint32_t>(reduction.dtype);
  entry.count = static_cast<std::int64_t>(reduction.result.size());
  entry.buffer_id = id_of(reduction.source->name());
  entry.buffer_offset = reduction.source_offset.value;
  set_tag(entry, tag);
  const auto own = link_.memory().find(link_.rank(), entry.buffer_id);
  if (!own) {
    throw UsageError(
        fmt::format("the source of a reduce_scatter must be allocated by the same "
                    "collectives ('{}' of '{}' is not)",
                    reduction.source->name(), tag));
  }
  check_bounds(reduction, *own, link_.world_size(), tag);
  const std::uint64_t number = link_.publish(entry);
  pending_.push_back({number, reduction});
  return number;
}

bool ReductionQueue::pull_next() {
  if (pending_.empty()) return false;
  const Pending next = pending_.front();
  if (link_.unpublished_by(next.number) != RankLink::kNobody) return false;
  link_.check_agreement(next.number);
  try {
    pull(next);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {  // peers wait for this rank's part and must not hang
    link_.fail(fmt::format("reduce_scatter failed on rank {}: {}", link_.name_of(link_.rank()),
                           error.what()));
  }
  pending_.pop_front();
  link_.finish(next.number);
  link_.ring_peers();
  return true;
}

void ReductionQueue::pull(const Pending& pending) {
  const Reduction& reduction = pending.reduction;
  const std::size_t bytes = slice_bytes(reduction).size();
  const std::size_t mine = static_cast<std::size_t>(link_.rank()) * bytes;
  views_.clear();
  sources_.clear();
  for (int r = 0; r < link_.world_size(); ++r) {
    views_.push_back(source_of(r, pending));
    const OperationEntry& entry = link_.entry(r, pending.number);
    sources_.push_back(views_.back().bytes.data() + entry.buffer_offset + mine);
  }
  kernels::sum_in_order(reduction.result, sources_, reduction.dtype, reduction.scale,
                        reduction.accumulate, pool_);
  views_.clear();
}

BufferView ReductionQueue::source_of(int rank, const Pending& pending) {
  const OperationEntry& entry = link_.entry(rank, pending.number);
  auto view = link_.memory().find(rank, entry.buffer_id);
  if (!view) {
    link_.check_usable();  // a rank that gave up has told why before it freed anything
    link_.fail(
        fmt::format("rank {} freed the source buffer of an operation that is not complete: "
                    "wait() for it first (operation {}: {})",
                    link_.name_of(rank), pending.number, describe(entry)));
  }
  const Bytes end =
      Bytes(entry.buffer_offset) + slice_bytes(pending.reduction) * link_.world_size();
  STRATA_ASSERT(end <= Bytes(view->bytes.size()));
  return *std::move(view);
}

void ReductionQueue::drain() {
  if (pending_.empty()) return;
  const auto missing = [&] {
    return pending_.empty() ? RankLink::kNobody : link_.unpublished_by(pending_.back().number);
  };
  link_.wait_until(missing, [&] {
    return fmt::format("operation {} ({})", pending_.front().number,
                       describe(link_.entry(link_.rank(), pending_.front().number)));
  });
  while (pull_next()) {
  }
}

void ReductionQueue::wait(std::uint64_t number) {
  link_.wait_until([&] { return link_.unfinished_by(number); },
                   [&] {
                     return fmt::format("operation {} ({})", number,
                                        describe(link_.entry(link_.rank(), number)));
                   });
}

}  // namespace strata::comm

#include "strata/comm/host/rank_operations.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
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
    link_.check_usable();  // a rank that failed has given its reason before it freed anything
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

namespace {

double combine(double a, double b, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return a + b;
    case ReduceOp::kMin:
      return b < a ? b : a;
    case ReduceOp::kMax:
      return b > a ? b : a;
  }
  return a;
}

}  // namespace

void MessageRounds::round(OperationEntry entry, std::span<const std::byte> message,
                          const Read& read) {
  STRATA_ASSERT(message.size() <= kMailboxBytes);
  reductions_.drain();
  const std::size_t box = rounds_++ % 2;
  ControlBlock& own = link_.memory().control(link_.rank());
  if (!message.empty()) std::memcpy(own.mailbox[box].data(), message.data(), message.size());
  entry.payload_bytes = message.size();
  const std::uint64_t number = link_.publish(entry);
  link_.wait_until([&] { return link_.unpublished_by(number); },
                   [&] { return fmt::format("operation {} ({})", number, describe(entry)); });
  link_.check_agreement(number);
  for (int r = 0; r < link_.world_size(); ++r) {
    const OperationEntry& theirs = link_.entry(r, number);
    const std::span<const std::byte> mail(link_.memory().control(r).mailbox[box]);
    read(r, theirs, mail.first(theirs.payload_bytes));
  }
  // No bell: a rank that waits for a free slot of its ring looks again by itself.
  link_.finish(number);
}

void MessageRounds::all_reduce(std::span<double> values, ReduceOp op) {
  constexpr std::size_t kPart = kMailboxBytes / sizeof(double);
  const auto total = static_cast<std::int64_t>(values.size());
  do {
    const std::size_t part = std::min(kPart, values.size());
    all_reduce_part(values.first(part), op, total);
    values = values.subspan(part);
  } while (!values.empty());
}

void MessageRounds::all_reduce_part(std::span<double> values, ReduceOp op, std::int64_t total) {
  OperationEntry entry;
  entry.kind = OperationKind::kAllReduce;
  entry.detail = static_cast<std::uint32_t>(op);
  entry.count = total;
  round(entry, std::as_bytes(values),
        [&](int rank, const OperationEntry&, std::span<const std::byte> mail) {
          for (std::size_t i = 0; i < values.size(); ++i) {
            double theirs = 0;
            std::memcpy(&theirs, mail.data() + i * sizeof(double), sizeof(double));
            values[i] = rank == 0 ? theirs : combine(values[i], theirs, op);
          }
        });
}

void MessageRounds::broadcast(std::span<std::byte> bytes, int root) {
  if (root < 0 || root >= link_.world_size()) {
    throw UsageError(fmt::format("the root of a broadcast must be a rank (root {}, world size {})",
                                 root, link_.world_size()));
  }
  OperationEntry entry;
  entry.kind = OperationKind::kBroadcast;
  entry.detail = static_cast<std::uint32_t>(root);
  entry.count = static_cast<std::int64_t>(bytes.size());
  do {
    const std::span<std::byte> part = bytes.first(std::min(kMailboxBytes, bytes.size()));
    const bool sender = link_.rank() == root;
    round(entry, sender ? part : std::span<std::byte>(),
          [&](int rank, const OperationEntry&, std::span<const std::byte> mail) {
            if (rank != root || sender || part.empty()) return;
            std::memcpy(part.data(), mail.data(), part.size());
          });
    bytes = bytes.subspan(part.size());
  } while (!bytes.empty());
}

std::vector<std::string> MessageRounds::all_gather_text(const std::string& text) {
  std::vector<std::string> texts(static_cast<std::size_t>(link_.world_size()));
  std::span<const std::byte> rest = std::as_bytes(std::span(text));
  OperationEntry entry;
  entry.kind = OperationKind::kText;
  bool more = true;
  while (more) {
    const auto part = rest.first(std::min(kMailboxBytes, rest.size()));
    rest = rest.subspan(part.size());
    entry.remaining_bytes = rest.size();
    more = false;
    round(entry, part,
          [&](int rank, const OperationEntry& theirs, std::span<const std::byte> mail) {
            const std::size_t at = static_cast<std::size_t>(rank);
            texts[at].append(reinterpret_cast<const char*>(mail.data()), mail.size());
            more = more || theirs.remaining_bytes > 0;
          });
  }
  return texts;
}

void MessageRounds::barrier() {
  OperationEntry entry;
  entry.kind = OperationKind::kBarrier;
  round(entry, {}, [](int, const OperationEntry&, std::span<const std::byte>) {});
}

}  // namespace strata::comm

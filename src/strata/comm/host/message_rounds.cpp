#include "strata/comm/host/message_rounds.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "strata/base/error.h"

namespace strata::comm {
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

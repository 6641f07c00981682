#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/comm/host/bulk_copy.h"
#include "strata/comm/host/host_collectives.h"
#include "strata/comm/host/rank_link.h"
#include "strata/kernels/elementwise.h"

namespace strata::comm {
namespace {

// A flat buffer of this size leaves little of a last-level cache to anything else. Measured: below
// it plain copies are faster by half, above it streaming ones.
constexpr std::size_t kPastCachesFrom = std::size_t{16} << 20;

Bytes slice_bytes(const Reduction& reduction) {
  return bytes_of(Numel(reduction.result.size()), reduction.dtype);
}

std::string text_of(std::uint64_t number, const OperationEntry& entry) {
  return fmt::format("operation {} ({})", number, describe(entry));
}

// The reductions and exchanges of one rank of a host over its RankLink. They go on beside the
// rank's other work.
class PullQueue {
 public:
  PullQueue(RankLink& link, ThreadPool* pool) : link_(link), pool_(pool) {}

  // Returns the operation's number. Throws UsageError for arguments that do not fit together.
  std::uint64_t start(const Reduction& reduction, std::string_view tag) {
    describe_reduction(reduction, link_.world_size(), tag);  // checks the arguments
    OperationEntry entry{.kind = OperationKind::kReduceScatter,
                         .detail = static_cast<std::uint32_t>(reduction.dtype),
                         .count = std::ssize(reduction.result),
                         .buffer_id = id_of(reduction.source->name()),
                         .buffer_offset = reduction.source_offset.value};
    return publish(entry, "source of a reduce_scatter", *reduction.source, tag, {0, reduction, {}});
  }
  std::uint64_t start(const Exchange& exchange, std::string_view tag) {
    describe_exchange(exchange, link_.rank(), link_.world_size(), tag);
    const OperationEntry entry{.kind = OperationKind::kExchange,
                               .detail = exchange.parcels->fingerprint(),
                               .count = exchange.parcels->total().value,
                               .buffer_id = id_of(exchange.source->name())};
    return publish(entry, "source of an exchange", *exchange.source, tag, {0, {}, exchange});
  }
  // Finishes the oldest one if every rank has published it; false when there is nothing to do.
  bool pull_next() {
    if (pending_.empty()) return false;
    const Pending next = pending_.front();
    if (link_.unpublished_by(next.number) != RankLink::kNobody) return false;
    link_.check_agreement(next.number);
    try {
      pull(next);
    } catch (const CommError&) {
      throw;
    } catch (const std::exception& error) {  // peers wait for this rank's part and must not hang
      const std::string what = describe(link_.entry(link_.rank(), next.number));
      link_.fail(
          fmt::format("{} failed on rank {}: {}", what, link_.name_of(link_.rank()), error.what()));
    }
    pending_.pop_front();
    link_.finish(next.number);
    link_.ring_peers();
    return true;
  }
  // Waits until this rank has pulled every one it started.
  void drain() {
    if (pending_.empty()) return;
    const auto missing = [&] {
      return pending_.empty() ? RankLink::kNobody : link_.unpublished_by(pending_.back().number);
    };
    link_.wait_until(missing, [&] {
      const std::uint64_t first = pending_.front().number;
      return text_of(first, link_.entry(link_.rank(), first));
    });
    while (pull_next()) {
    }
  }
  // Whether every rank has pulled operation `number`, so that its buffers are free again.
  bool complete(std::uint64_t number) { return link_.unfinished_by(number) == RankLink::kNobody; }
  void wait(std::uint64_t number) {
    link_.wait_until([&] { return link_.unfinished_by(number); },
                     [&] { return text_of(number, link_.entry(link_.rank(), number)); });
  }

 private:
  struct Pending {
    std::uint64_t number;
    Reduction reduction;
    Exchange exchange;  // without a source: it is a reduction
  };

  std::uint64_t publish(OperationEntry entry, std::string_view role, const SharedBuffer& source,
                        std::string_view tag, Pending pending) {
    set_tag(entry, tag);
    if (!link_.memory().find(link_.rank(), entry.buffer_id))
      throw_foreign_buffer(role, source, tag);
    pending.number = link_.publish(entry);
    pending_.push_back(pending);
    return pending.number;
  }
  void pull(const Pending& pending) {
    if (pending.exchange.source != nullptr) return pull_parcels(pending);
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
  // Each rank starts at its right neighbour, so that not all read from the same one.
  void pull_parcels(const Pending& pending) {
    const Parcels& parcels = *pending.exchange.parcels;
    const int mine = link_.rank();
    const std::span<std::byte> target = pending.exchange.target;
    for (int step = 0; step < link_.world_size(); ++step) {
      const int from = (mine + step) % link_.world_size();
      const std::size_t bytes = parcels.at(from, mine).size();
      if (bytes == 0) continue;
      const BufferView view = source_of(from, pending);
      bulk_copy(target.subspan(parcels.in_target(from, mine).size(), bytes),
                view.bytes.subspan(parcels.in_source(from, mine).size(), bytes),
                target.size() >= kPastCachesFrom ? CopyHint::kPastCaches : CopyHint::kInCaches,
                pool_);
    }
  }
  BufferView source_of(int rank, const Pending& pending) {
    const OperationEntry& entry = link_.entry(rank, pending.number);
    auto view = link_.memory().find(rank, entry.buffer_id);
    if (!view) {
      link_.check_usable();  // a rank that failed has given its reason before it freed anything
      link_.fail(
          fmt::format("rank {} freed the source buffer of an operation that is not complete: "
                      "wait() for it first (operation {}: {})",
                      link_.name_of(rank), pending.number, describe(entry)));
    }
    const Bytes bytes = pending.exchange.source != nullptr
                            ? pending.exchange.parcels->sent(rank)
                            : slice_bytes(pending.reduction) * link_.world_size();
    const Bytes end = Bytes(entry.buffer_offset) + bytes;
    STRATA_ASSERT(end <= Bytes(view->bytes.size()));
    return *std::move(view);
  }

  RankLink& link_;
  ThreadPool* pool_;
  std::deque<Pending> pending_;
  std::vector<BufferView> views_;  // of one pull; kept to save allocations
  std::vector<const std::byte*> sources_;
};

// The small collectives: every rank puts a message in its mailbox, and when all have done so each
// rank reads all of them. A message larger than a mailbox takes several rounds. Threads: those of
// the RankLink. Errors: CommError through the link.
class MessageRounds {
 public:
  MessageRounds(RankLink& link, PullQueue& pulls) : link_(link), pulls_(pulls) {}

  void all_reduce(std::span<double> values, ReduceOp op) {
    constexpr std::size_t kPart = kMailboxBytes / sizeof(double);
    const auto total = static_cast<std::int64_t>(values.size());
    do {
      const std::size_t part = std::min(kPart, values.size());
      all_reduce_part(values.first(part), op, total);
      values = values.subspan(part);
    } while (!values.empty());
  }
  void broadcast(std::span<std::byte> bytes, int root) {
    describe_broadcast(Bytes(bytes.size()), root, link_.world_size());  // checks the root
    const OperationEntry entry{.kind = OperationKind::kBroadcast,
                               .detail = static_cast<std::uint32_t>(root),
                               .count = std::ssize(bytes)};
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
  std::vector<std::string> all_gather_text(const std::string& text) {
    std::vector<std::string> texts(static_cast<std::size_t>(link_.world_size()));
    std::span<const std::byte> rest = std::as_bytes(std::span(text));
    OperationEntry entry{.kind = OperationKind::kText};
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
  void barrier() {
    round({.kind = OperationKind::kBarrier}, {},
          [](int, const OperationEntry&, std::span<const std::byte>) {});
  }

 private:
  using Read = std::function<void(int rank, const OperationEntry&, std::span<const std::byte>)>;

  // One operation. Reductions that were started before it are pulled first, so that no rank waits
  // here for one that waits for this rank's part of a reduction.
  void round(OperationEntry entry, std::span<const std::byte> message, const Read& read) {
    STRATA_ASSERT(message.size() <= kMailboxBytes);
    pulls_.drain();
    const std::size_t box = rounds_++ % 2;
    ControlBlock& own = link_.memory().control(link_.rank());
    if (!message.empty()) std::memcpy(own.mailbox[box].data(), message.data(), message.size());
    entry.payload_bytes = message.size();
    const std::uint64_t number = link_.publish(entry);
    link_.wait_until([&] { return link_.unpublished_by(number); },
                     [&] { return text_of(number, entry); });
    link_.check_agreement(number);
    for (int r = 0; r < link_.world_size(); ++r) {
      const OperationEntry& theirs = link_.entry(r, number);
      const std::span<const std::byte> mail(link_.memory().control(r).mailbox[box]);
      read(r, theirs, mail.first(theirs.payload_bytes));
    }
    // No bell: a rank that waits for a free slot of its ring looks again by itself.
    link_.finish(number);
  }
  void all_reduce_part(std::span<double> values, ReduceOp op, std::int64_t total) {
    round({.kind = OperationKind::kAllReduce,
           .detail = static_cast<std::uint32_t>(op),
           .count = total},
          std::as_bytes(values),
          [&](int rank, const OperationEntry&, std::span<const std::byte> mail) {
            for (std::size_t i = 0; i < values.size(); ++i) {
              double theirs = 0;
              std::memcpy(&theirs, mail.data() + i * sizeof(double), sizeof(double));
              values[i] = rank == 0 ? theirs : combine_values(values[i], theirs, op);
            }
          });
  }

  RankLink& link_;
  PullQueue& pulls_;
  std::uint64_t rounds_ = 0;
};

// Shared by the Collectives and its Works, which may outlive it.
struct PullCore {
  PullCore(std::unique_ptr<RankMemory> memory, const CommOptions& options)
      : link(std::move(memory), options),
        pulls(link, options.pool),
        messages(link, pulls),
        pool(options.pool) {
    link.set_progress([this] { return pulls.pull_next(); });
  }

  RankLink link;
  PullQueue pulls;
  MessageRounds messages;
  ThreadPool* pool;
};

class PullWork final : public Work {
 public:
  PullWork(std::shared_ptr<PullCore> core, std::uint64_t number)
      : core_(std::move(core)), number_(number) {}

  ~PullWork() override { wait_quietly(); }

  bool done() override {
    if (complete_ || core_->link.broken()) return true;
    while (core_->pulls.pull_next()) {
    }
    complete_ = core_->pulls.complete(number_);
    return complete_;
  }

  void wait() override {
    if (complete_) return;
    if (core_->link.broken()) core_->link.check_usable();
    core_->pulls.wait(number_);
    complete_ = true;
  }

 private:
  std::shared_ptr<PullCore> core_;
  std::uint64_t number_;
  bool complete_ = false;
};

class PullCollectives final : public Collectives {
 public:
  PullCollectives(std::unique_ptr<RankMemory> memory, const CommOptions& options)
      : Collectives(memory->rank(), among(kHostMemoryTraits, memory->rank(), memory->world_size())),
        core_(std::make_shared<PullCore>(std::move(memory), options)) {}
  ~PullCollectives() override { core_->link.destroyed(); }

  std::string_view name() const override { return core_->link.memory().name(); }

  std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) override {
    core_->link.check_usable();
    auto buffer = core_->link.memory().allocate(std::move(name), bytes);
    core_->link.ring_peers();  // one may be waiting for this name
    return buffer;
  }

  std::unique_ptr<Work> all_gather(const SliceMap& slices, std::span<std::byte> flat,
                                   std::string_view tag) override {
    begin("all_gather", tag);
    const std::string what = describe_gather(slices, flat, rank(), world_size(), tag).what;
    if (slices.buffer == nullptr)
      throw UsageError("{} needs a buffer, since peers read it; got none", what);
    while (core_->pulls.pull_next()) {  // peers may be waiting for it
    }
    // Each rank starts at its right neighbour, so that not all read from the same one.
    const bool empty = slices.slice_bytes == Bytes(0);
    for (int step = 0; !empty && step < world_size(); ++step)
      pull_slice((rank() + step) % world_size(), slices, flat, tag);
    return std::make_unique<CompletedWork>();
  }

  std::unique_ptr<Work> reduce_scatter(const Reduction& reduction, std::string_view tag) override {
    begin("reduce_scatter", tag);
    return started(core_->pulls.start(reduction, tag));
  }

  std::unique_ptr<Work> exchange(const Exchange& exchange, std::string_view tag) override {
    begin("exchange", tag);
    return started(core_->pulls.start(exchange, tag));
  }

  void all_reduce(std::span<double> values, ReduceOp op) override {
    begin("all_reduce", "");
    core_->messages.all_reduce(values, op);
  }

  void broadcast(std::span<std::byte> bytes, int root) override {
    begin("broadcast", "");
    core_->messages.broadcast(bytes, root);
  }

  std::vector<std::string> all_gather_text(const std::string& text) override {
    begin("all_gather_text", "");
    return core_->messages.all_gather_text(text);
  }

  void barrier() override {
    begin("barrier", "");
    core_->messages.barrier();
  }

  // Gathers are over when they return.
  std::unique_ptr<Work> finish_gathers() override {
    barrier();
    return nullptr;
  }

  void announce_departure(std::string_view words) override {
    Collectives::announce_departure(words);
    core_->link.announce_departure(words);
  }

  void require_usable() override { core_->link.check_usable(); }

  void end(Ending ending, std::string_view reason) noexcept override {
    core_->link.end(ending, reason);
  }

 private:
  std::unique_ptr<Work> started(std::uint64_t number) {
    auto work = std::make_unique<PullWork>(core_, number);
    core_->pulls.pull_next();
    return work;
  }
  void begin(std::string_view call, std::string_view tag) {
    core_->link.check_usable();
    std::array<char, kTagChars> text{};
    const auto end = fmt::format_to_n(text.begin(), text.size(), "{} {}", call, tag);
    const std::size_t length = std::min<std::size_t>(end.size, text.size());
    core_->link.set_activity(std::string_view(text.data(), length));
  }

  void pull_slice(int from, const SliceMap& slices, std::span<std::byte> flat,
                  std::string_view tag) {
    const BufferView view = wait_for_buffer(from, *slices.buffer, tag);
    const Bytes offset = slices.first_offset + slices.stride * from;
    if (offset < Bytes(0) || offset + slices.slice_bytes > Bytes(view.bytes.size())) {
      core_->link.fail(fmt::format(
          "all_gather of '{}': the slice of rank {} lies outside its buffer '{}'; every rank must "
          "allocate it for the same layout (offset {}, slice of {} B, buffer of {} B)",
          tag, core_->link.name_of(from), slices.buffer->name(), offset.value,
          slices.slice_bytes.value, view.bytes.size()));
    }
    const std::size_t bytes = slices.slice_bytes.size();
    const auto source = view.bytes.subspan(offset.size(), bytes);
    const auto target = flat.subspan(static_cast<std::size_t>(from) * bytes, bytes);
    if (source.data() == target.data()) return;  // gathered in place
    const bool large = flat.size() >= kPastCachesFrom;
    bulk_copy(target, source, large ? CopyHint::kPastCaches : CopyHint::kInCaches, core_->pool);
  }
  BufferView wait_for_buffer(int from, const SharedBuffer& mine, std::string_view tag) {
    const std::uint64_t id = id_of(mine.name());
    std::optional<BufferView> view = core_->link.memory().find(from, id);
    if (!view && from == rank()) throw_foreign_buffer("buffer of an all_gather", mine, tag);
    if (!view) {
      core_->link.wait_until(
          [&] {
            view = core_->link.memory().find(from, id);
            return view ? RankLink::kNobody : from;
          },
          [&] {
            return fmt::format("buffer '{}' of rank {} to be allocated (all_gather of '{}')",
                               mine.name(), core_->link.name_of(from), tag);
          });
    }
    return *std::move(view);
  }

  std::shared_ptr<PullCore> core_;
};

}  // namespace

std::unique_ptr<Collectives> make_pull_collectives(std::unique_ptr<RankMemory> memory,
                                                   const CommOptions& options) {
  return std::make_unique<PullCollectives>(std::move(memory), options);
}

}  // namespace strata::comm

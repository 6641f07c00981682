#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "strata/base/error.h"
#include "strata/comm/host/bulk_copy.h"
#include "strata/comm/host/host_collectives.h"
#include "strata/comm/host/rank_link.h"
#include "strata/comm/host/rank_operations.h"

namespace strata::comm {
namespace {

// A flat buffer of this size leaves little of a last-level cache to anything else. Measured: below
// it plain copies are faster by half, above it streaming ones.
constexpr std::size_t kPastCachesFrom = std::size_t{16} << 20;

// Shared by the Collectives and its Works, which may outlive it.
struct PullCore {
  PullCore(std::unique_ptr<RankMemory> memory, const CommOptions& options)
      : link(std::move(memory), options),
        reductions(link, options.pool),
        messages(link, reductions),
        pool(options.pool) {
    link.set_progress([this] { return reductions.pull_next(); });
  }

  RankLink link;
  ReductionQueue reductions;
  MessageRounds messages;
  ThreadPool* pool;
};

class PullReduction final : public Work {
 public:
  PullReduction(std::shared_ptr<PullCore> core, std::uint64_t number)
      : core_(std::move(core)), number_(number) {}

  ~PullReduction() override {
    try {
      wait();
    } catch (const std::exception&) {
      return;  // wait() reports the error
    }
  }

  bool done() override {
    if (complete_ || core_->link.broken()) return true;
    while (core_->reductions.pull_next()) {
    }
    complete_ = core_->reductions.complete(number_);
    return complete_;
  }

  void wait() override {
    if (complete_) return;
    if (core_->link.broken()) core_->link.check_usable();
    core_->reductions.wait(number_);
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
                                   std::string_view tag) override;

  std::unique_ptr<Work> reduce_scatter(const Reduction& reduction, std::string_view tag) override {
    begin("reduce_scatter", tag);
    const std::uint64_t number = core_->reductions.start(reduction, tag);
    auto work = std::make_unique<PullReduction>(core_, number);
    core_->reductions.pull_next();
    return work;
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
  void begin(std::string_view call, std::string_view tag) {
    core_->link.check_usable();
    std::array<char, kTagChars> text{};
    const auto end = fmt::format_to_n(text.begin(), text.size(), "{} {}", call, tag);
    const std::size_t length = std::min<std::size_t>(end.size, text.size());
    core_->link.set_activity(std::string_view(text.data(), length));
  }

  void check_arguments(const SliceMap& slices, std::span<const std::byte> flat,
                       std::string_view tag);
  void pull_slice(int from, const SliceMap& slices, std::span<std::byte> flat,
                  std::string_view tag);
  BufferView wait_for_buffer(int from, const SharedBuffer& mine, std::string_view tag);

  std::shared_ptr<PullCore> core_;
};

std::unique_ptr<Work> PullCollectives::all_gather(const SliceMap& slices, std::span<std::byte> flat,
                                                  std::string_view tag) {
  begin("all_gather", tag);
  check_arguments(slices, flat, tag);
  while (core_->reductions.pull_next()) {  // peers may be waiting for it
  }
  // Each rank starts at its right neighbour, so that not all read from the same one.
  const bool empty = slices.slice_bytes == Bytes(0);
  for (int step = 0; !empty && step < world_size(); ++step) {
    pull_slice((rank() + step) % world_size(), slices, flat, tag);
  }
  return std::make_unique<CompletedWork>();
}

void PullCollectives::check_arguments(const SliceMap& slices, std::span<const std::byte> flat,
                                      std::string_view tag) {
  const Bytes wanted = slices.slice_bytes * world_size();
  if (slices.buffer == nullptr || Bytes(flat.size()) != wanted) {
    throw UsageError(
        fmt::format("all_gather needs a buffer and a target of world size x slice bytes ('{}': {} "
                    "buffer, {} x {} B, target of {} B)",
                    tag, slices.buffer == nullptr ? "no" : "a", world_size(),
                    slices.slice_bytes.value, flat.size()));
  }
}

void PullCollectives::pull_slice(int from, const SliceMap& slices, std::span<std::byte> flat,
                                 std::string_view tag) {
  const BufferView view = wait_for_buffer(from, *slices.buffer, tag);
  const Bytes offset = slices.first_offset + slices.stride * from;
  if (offset < Bytes(0) || offset + slices.slice_bytes > Bytes(view.bytes.size())) {
    const std::string message = fmt::format(
        "all_gather of '{}': the slice of rank {} lies outside its buffer '{}'; every rank must "
        "allocate it for the same layout (offset {}, slice of {} B, buffer of {} B)",
        tag, core_->link.name_of(from), slices.buffer->name(), offset.value,
        slices.slice_bytes.value, view.bytes.size());
    if (from == rank()) throw UsageError(message);
    core_->link.fail(message);
  }
  const std::size_t bytes = slices.slice_bytes.size();
  const auto source = view.bytes.subspan(offset.size(), bytes);
  const auto target = flat.subspan(static_cast<std::size_t>(from) * bytes, bytes);
  if (source.data() == target.data()) return;  // gathered in place
  const bool large = flat.size() >= kPastCachesFrom;
  bulk_copy(target, source, large ? CopyHint::kPastCaches : CopyHint::kInCaches, core_->pool);
}

BufferView PullCollectives::wait_for_buffer(int from, const SharedBuffer& mine,
                                            std::string_view tag) {
  const std::uint64_t id = id_of(mine.name());
  std::optional<BufferView> view = core_->link.memory().find(from, id);
  if (!view && from == rank()) {
    throw UsageError(
        fmt::format("the buffer of an all_gather must be allocated by the same "
                    "collectives ('{}' of '{}' is not)",
                    mine.name(), tag));
  }
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

}  // namespace

std::unique_ptr<Collectives> make_pull_collectives(std::unique_ptr<RankMemory> memory,
                                                   const CommOptions& options) {
  return std::make_unique<PullCollectives>(std::move(memory), options);
}

}  // namespace strata::comm

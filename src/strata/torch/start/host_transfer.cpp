#include "strata/torch/start/host_transfer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

#include "strata/base/error.h"
#include "strata/kernels/fingerprint.h"
#include "strata/memory/host_buffer.h"
#include "strata/torch/base/tensors.h"

namespace strata::torch {
namespace {

constexpr Bytes kValueAlignment = 256_B;  // at which values of a parameter begin in a buffer

}  // namespace

// Threads that fill buffers in the order of turns, as the ring opens them.
class HostIntake::Filling final : public checkpoint::Source {
 public:
  Filling(HostIntake& intake, ThreadPool& threads)
      : turns_(intake.turns_),
        blocks_(intake.blocks_),
        looks_(intake.looks_),
        buffers_(intake.turns_.size()),
        left_(std::make_unique<std::atomic<std::int64_t>[]>(intake.turns_.size())) {
    for (std::size_t i = 0; i < intake.turns_.size(); ++i) left_[i] = intake.turns_[i].blocks;
    leader_ = std::jthread([this, &threads] {
      // After the blocks, one turn for each thread to help with the remaining fingerprints.
      const auto kept = static_cast<std::int64_t>(blocks_.size());
      threads.parallel_for(kept + threads.threads(), 1, [this](std::int64_t i, std::int64_t) {
        if (static_cast<std::size_t>(i) < blocks_.size()) {
          fill(blocks_[static_cast<std::size_t>(i)]);
        } else {
          while (look()) {
          }
        }
      });
    });
  }

  // If not all turns were opened, there has been an error: blocks that were not begun are dropped.
  ~Filling() override {
    if (opened_ < buffers_.size()) stopped_ = true;
    opened_ = buffers_.size();
    opened_.notify_all();
  }

  bool next(checkpoint::Piece& piece) override {
    if (next_ == turns_.size()) return false;
    piece.bytes = Bytes(turns_[next_++].used);
    return true;
  }
  std::unique_ptr<io::Transfer> fill(checkpoint::Piece& piece,
                                     std::span<std::byte> buffer) override {
    buffers_[opened_] = buffer.data();
    ++opened_;
    opened_.notify_all();
    return std::make_unique<Turnful>(left_[piece.index]);
  }

 private:
  // Ends when a turn's buffer is full.
  class Turnful final : public io::Transfer {
   public:
    explicit Turnful(std::atomic<std::int64_t>& left) : left_(left) {}
    ~Turnful() override { Turnful::wait(); }
    bool done() override { return left_ == 0; }
    void wait() override {
      for (std::int64_t left = left_; left > 0; left = left_) left_.wait(left);
    }

   private:
    std::atomic<std::int64_t>& left_;  // blocks
  };

  bool look() {
    const std::size_t next = next_look_.fetch_add(1);
    if (next >= looks_.size() || stopped_) return false;
    write_sums(looks_[next], kernels::fingerprint(looks_[next].bytes, nullptr));
    return true;
  }

  void fill(const Block& block) {
    for (std::size_t opened = opened_; opened <= block.turn; opened = opened_) {
      if (!look()) opened_.wait(opened);
    }
    if (stopped_) return;
    kernels::Fingerprint sums =
        kernels::fingerprint_and_copy(buffers_[block.turn] + block.at, block.kept);
    const bool all = block.kept.size() == block.bytes.size();
    if (!all && block.fingerprint != nullptr) sums = kernels::fingerprint(block.bytes, nullptr);
    write_sums(block, sums);
    if (left_[block.turn].fetch_sub(1) == 1) left_[block.turn].notify_all();
  }

  static void write_sums(const Block& block, const kernels::Fingerprint& sums) {
    if (block.fingerprint != nullptr) std::memcpy(block.fingerprint, &sums, sizeof(sums));
  }

  const std::vector<Turn>& turns_;
  const std::vector<Block>& blocks_;
  const std::vector<Block>& looks_;
  std::size_t next_ = 0;                               // of the turns
  std::vector<std::byte*> buffers_;                    // by turn
  std::atomic<std::size_t> opened_{0};                 // turns whose buffers are there
  std::unique_ptr<std::atomic<std::int64_t>[]> left_;  // blocks that are not copied yet, by turn
  std::atomic<std::size_t> next_look_{0};
  std::atomic<bool> stopped_{false};
  std::jthread leader_;  // the last: it ends before the others go
};

HostIntake::HostIntake(engine::Engine& engine, ThreadPool& threads, Comparison* comparison,
                       engine::InitReport::Phase& phase, bool at_once,
                       const checkpoint::RingOptions& ring)
    : engine_(engine),
      threads_(threads),
      comparison_(comparison),
      phase_(phase),
      at_once_(at_once),
      ring_options_(ring) {
  STRATA_ASSERT(ring.buffers > static_cast<int>(kTaking) && ring.buffer_bytes >= kBlock);
}

void HostIntake::add(int param, Numel begin, const at::Tensor& values) {
  STRATA_ASSERT(values.is_cpu() && values.is_contiguous());
  const int world = engine_.collectives().world_size();
  const bool replicated = engine_.collectives().shard_position().groups > 1;
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
    // No other rank keeps such a block, so there is nothing to compare.
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
      looks_.push_back(block);
    }
  }
}

void HostIntake::keep(int param, Numel begin, Numel count, Block block, DType dtype) {
  const auto next_store = [&](const Turn& turn) {
    return !turn.stores.empty() && turn.stores.back().param == param &&
           turn.stores.back().begin + turn.stores.back().count == begin;
  };
  const auto place_in = [&](const Turn& turn) {
    const Bytes used(static_cast<std::int64_t>(turn.used));
    return (next_store(turn) ? used : align_up(used, kValueAlignment)).size();
  };
  const std::size_t room = ring_options_.buffer_bytes.size();
  if (turns_.empty() || place_in(turns_.back()) + block.kept.size() > room) turns_.emplace_back();
  Turn& turn = turns_.back();
  block.turn = turns_.size() - 1;
  block.at = place_in(turn);
  if (next_store(turn)) {
    turn.stores.back().count += count;
  } else {
    turn.stores.push_back({param, begin, count, block.at, dtype});
  }
  turn.used = block.at + block.kept.size();
  ++turn.blocks;
  blocks_.push_back(block);
}

class HostIntake::TurnSink final : public checkpoint::Sink {
 public:
  explicit TurnSink(HostIntake& intake) : intake_(intake), weights_(intake.engine_.weights()) {}

  device::Stream* stream() override { return &intake_.engine_.device().compute_stream(); }
  std::unique_ptr<io::Transfer> take(const checkpoint::Piece& piece) override {
    if (piece.index == 0 && intake_.at_once_) weights_.back_all();  // while buffers are filled
    for (const Store& store : intake_.turns_[piece.index].stores) {
      weights_.enqueue_store(store.param, store.begin, store.count, piece.content.data() + store.at,
                             store.dtype, &owed_);
      intake_.phase_.moved(bytes_of(store.count, store.dtype));
    }
    return nullptr;
  }
  void settle() override { weights_.make_masters(owed_); }

 private:
  HostIntake& intake_;
  engine::Weights& weights_;
  engine::OwedMasters owed_;
};

void HostIntake::flush(const std::function<void()>& stored) {
  {
    Filling filling(*this, threads_);  // looks, until there are buffers
    if (!turns_.empty()) {
      if (!ring_) ring_.emplace(ring_options_, engine_.device());
      TurnSink sink(*this);
      checkpoint::Pipeline pipeline(filling, sink, *ring_, {.taking = kTaking});
      pipeline.pump();
      pipeline.take_all();
    }
    if (stored) stored();
  }
  turns_.clear();
  blocks_.clear();
  looks_.clear();
}

namespace {

// Targets are new memory, whose pages the system allocates at the first write. Parts and buffers
// are larger than for other copies, so that many threads touch new pages at once and few of them
// the same huge page.
constexpr checkpoint::RingOptions kRing{4, 16_MiB};
constexpr Bytes kPart = 1_MiB;             // that one thread copies
constexpr Bytes kSourceAlignment = 256_B;  // of a source in a buffer

}  // namespace

at::Tensor empty_on_host(const at::Tensor& like) {
  const auto options = at::TensorOptions().dtype(like.scalar_type());
  const Bytes bytes(like.nbytes());
  if (bytes < memory::kHugePageSize) return at::empty(like.sizes(), options);
  auto memory = std::make_shared<memory::HostBuffer>(bytes);
  void* const data = memory->data();
  return at::from_blob(
      data, like.sizes(), [memory = std::move(memory)](void*) mutable { memory.reset(); }, options);
}

HostExport::HostExport(engine::Engine& engine, ThreadPool& threads,
                       engine::InitReport::Phase& phase)
    : engine_(engine), threads_(threads), phase_(phase), ring_(kRing, engine.device()) {}

void HostExport::add(std::span<std::byte> target, std::span<const std::byte> source) {
  STRATA_ASSERT(target.size() == source.size());
  const std::size_t room = ring_.buffer_bytes().size();
  while (!source.empty()) {
    std::size_t at = room;  // no buffer is open
    if (!turns_.empty()) {
      const Part& last = turns_.back().back();
      at = align_up(Bytes(last.at + last.source.size()), kSourceAlignment).size();
    }
    if (at >= room) {
      turns_.emplace_back();
      at = 0;
    }
    const std::size_t count = std::min(source.size(), room - at);
    turns_.back().push_back({target.first(count), source.first(count), at});
    target = target.subspan(count);
    source = source.subspan(count);
  }
}

class HostExport::PartSource final : public checkpoint::Source {
 public:
  explicit PartSource(HostExport& way) : way_(way) {}

  bool next(checkpoint::Piece& piece) override {
    if (next_ == way_.turns_.size()) return false;
    const Part& last = way_.turns_[next_++].back();
    piece.bytes = Bytes(last.at + last.source.size());
    return true;
  }
  device::Stream* stream() override { return &way_.engine_.device().compute_stream(); }
  std::unique_ptr<io::Transfer> fill(checkpoint::Piece& piece, std::span<std::byte>) override {
    for (const Part& part : way_.turns_[piece.index])
      way_.engine_.device().copy(piece.content.subspan(part.at, part.source.size()), part.source,
                                 *stream());
    return nullptr;
  }

 private:
  HostExport& way_;
  std::size_t next_ = 0;
};

class HostExport::PartSink final : public checkpoint::Sink {
 public:
  explicit PartSink(HostExport& way) : way_(way) {}

  std::unique_ptr<io::Transfer> take(const checkpoint::Piece& piece) override {
    struct Copy {
      std::byte* target;
      const std::byte* source;
      std::size_t bytes;
    };
    std::vector<Copy> copies;
    for (const Part& part : way_.turns_[piece.index]) {
      const std::size_t all = part.target.size();
      for (std::size_t done = 0; done < all; done += kPart.size())
        copies.push_back({part.target.data() + done, piece.content.data() + part.at + done,
                          std::min(kPart.size(), all - done)});
      way_.phase_.moved(Bytes(all));
    }
    way_.threads_.parallel_for(static_cast<std::int64_t>(copies.size()), 1,
                               [&](std::int64_t begin, std::int64_t end) {
                                 for (auto i = begin; i < end; ++i) {
                                   const Copy& each = copies[static_cast<std::size_t>(i)];
                                   std::memcpy(each.target, each.source, each.bytes);
                                 }
                               });
    return nullptr;
  }

 private:
  HostExport& way_;
};

void HostExport::flush() {
  PartSource source(*this);
  PartSink sink(*this);
  copy(source, sink, ring_);
  turns_.clear();
}

}  // namespace strata::torch

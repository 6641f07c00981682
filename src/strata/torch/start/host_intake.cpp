#include "strata/torch/start/host_intake.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

#include "strata/base/error.h"
#include "strata/kernels/fingerprint.h"
#include "strata/torch/base/dtype.h"

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

}  // namespace strata::torch

// Compares a live model's values over the ranks, and copies them between the host and the engine's
// device, through a ring of pinned buffers: the Sources and Sinks of checkpoint/pipeline.h. Work is
// in order with the current stream. Threads: the engine's, and those of the pool. Ownership:
// borrows all; sources, values and targets until flush(). Errors: OutOfMemoryError for the buffers,
// or as the engine's memory grows.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/engine/engine.h"
#include "strata/kernels/fingerprint.h"
#include "strata/memory/host_buffer.h"
#include "strata/torch/base/tensors.h"
#include "strata/torch/model/model_plan.h"

namespace strata::torch {

inline constexpr std::size_t kFingerprintBytes = sizeof(kernels::Fingerprint);
inline constexpr Bytes kBlock = 1_MiB;

// How many blocks a tensor of `bytes` is cut into.
inline std::size_t block_count(Bytes bytes) {
  return static_cast<std::size_t>((bytes.value + kBlock.value - 1) / kBlock.value);
}

// Fingerprints of the blocks of tensors' bytes, many tensors at a time. The bits do not depend on
// where a tensor lies. Borrows bytes and targets until flush().
class Fingerprints {
 public:
  // `device`: of tensors that are not on the host.
  Fingerprints(device::Device& device, ThreadPool& threads) : device_(device), threads_(threads) {}

  // Fingerprints of the blocks of these bytes go to `target`, one after the other.
  void add(std::span<const std::byte> bytes, bool on_host, std::span<char> target) {
    STRATA_ASSERT(target.size() == block_count(Bytes(bytes.size())) * kFingerprintBytes);
    if (bytes.empty()) return;
    if (!on_host) {
      on_device_.push_back({bytes, target.data()});
      return;
    }
    char* next = target.data();
    for (std::size_t at = 0; at < bytes.size(); at += kBlock.size()) {
      on_host_.push_back({bytes.subspan(at, std::min(kBlock.size(), bytes.size() - at)), next});
      next += kFingerprintBytes;
    }
  }
  // Computes the fingerprints of all added bytes.
  void flush() {
    threads_.parallel_for(
        static_cast<std::int64_t>(on_host_.size()), 1, [&](std::int64_t begin, std::int64_t end) {
          for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
            const kernels::Fingerprint sums = kernels::fingerprint(on_host_[i].bytes, nullptr);
            std::memcpy(on_host_[i].target, &sums, kFingerprintBytes);
          }
        });
    on_host_.clear();
    if (on_device_.empty()) return;
    std::vector<std::span<const std::byte>> runs;
    for (const Added& each : on_device_) runs.push_back(each.bytes);
    const auto sums = device_.fingerprints(runs, kBlock, device_.compute_stream());
    auto next = sums.begin();
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const std::size_t blocks = block_count(Bytes(runs[i].size()));
      std::memcpy(on_device_[i].target, &*next, blocks * kFingerprintBytes);
      next += static_cast<std::ptrdiff_t>(blocks);
    }
    on_device_.clear();
  }

 private:
  struct Added {
    std::span<const std::byte> bytes;
    char* target;
  };

  device::Device& device_;
  ThreadPool& threads_;
  std::vector<Added> on_device_;
  std::vector<Added> on_host_;  // a block each
};

// Finds the blocks of a live model's values that differ from rank 0's on any rank that keeps a part
// of them, by fingerprints (kernels::Fingerprint), so that no values are sent. The code that reads
// the values also writes their fingerprints, those of different blocks in any thread; one exchange
// then gives all ranks the same result. Errors: CommError.
class Comparison {
 public:
  Comparison(comm::Collectives& collectives, const std::vector<ModelParameter>& parameters)
      : collectives_(collectives) {
    first_.push_back(0);
    for (const ModelParameter& parameter : parameters) {
      const Bytes bytes(parameter.variable.nbytes());
      first_.push_back(first_.back() + (parameter.has_own_values() ? block_count(bytes) : 0));
    }
    differs_.resize(first_.back());
    if (!wanted()) return;
    found_.resize(first_.back() * kFingerprintBytes);
    given_.assign(first_.back(), '0');
  }

  // Whether ranks compare at all: there is more than one.
  bool wanted() const { return collectives_.world_size() > 1; }
  // Whether this is rank 0, with which the others are compared. It gives fingerprints of all blocks
  // except those that it alone keeps, the others of those of which they keep a part.
  bool is_reference() const { return wanted() && collectives_.rank() == 0; }

  // The place for this rank's fingerprints of `count` blocks of the parameter from `first` on.
  std::span<char> place_for(int param, std::size_t first, std::size_t count) {
    STRATA_ASSERT(wanted() && first_block(param) + first + count <= first_block(param + 1));
    const std::size_t begin = first_block(param) + first;
    std::fill_n(given_.begin() + static_cast<std::ptrdiff_t>(begin), count, '1');
    return std::span(found_).subspan(begin * kFingerprintBytes, count * kFingerprintBytes);
  }
  // Collective; called when all fingerprints have been written.
  void exchange() {
    if (!wanted()) return;
    const std::vector<std::string> all = collectives_.all_gather_text(found_ + given_);
    for (std::size_t i = 0; i < differs_.size(); ++i) {
      const auto at = [&](std::size_t rank) {
        return std::string_view(all[rank]).substr(i * kFingerprintBytes, kFingerprintBytes);
      };
      const auto given = [&](std::size_t rank) { return all[rank][found_.size() + i] == '1'; };
      for (std::size_t r = 1; r < all.size(); ++r)
        differs_[i] = differs_[i] || (given(0) && given(r) && at(r) != at(0));
      any_ = any_ || differs_[i];
    }
  }

  // Whether any block differs; valid after exchange(), and the same on every rank.
  bool any() const { return any_; }
  // The parameter's blocks as runs [begin, end), which differ as a whole or not; those that differ
  // have at most `most`.
  struct Run {
    std::size_t begin;
    std::size_t end;
    bool differs;
  };
  std::vector<Run> runs(int param, std::size_t most) const {
    std::vector<Run> runs;
    const std::size_t first = first_block(param);
    for (std::size_t i = first; i < first_block(param + 1); ++i) {
      const bool differs = differs_[i];
      const bool goes_on = !runs.empty() && runs.back().differs == differs &&
                           (!differs || runs.back().end - runs.back().begin < most);
      if (!goes_on) runs.push_back({i - first, i - first, differs});
      ++runs.back().end;
    }
    return runs;
  }

 private:
  std::size_t first_block(int param) const { return first_[static_cast<std::size_t>(param)]; }

  comm::Collectives& collectives_;
  std::vector<std::size_t> first_;  // by parameter, among all blocks; and their number
  std::string found_;               // kFingerprintBytes a block
  std::string given_;               // a block: '1' if found_ counts
  std::vector<bool> differs_;
  bool any_ = false;
};

// Copies values from the host into the engine's weights. Several threads read each byte once: they
// compute the fingerprints by which ranks compare, and copy this rank's part into the ring, which
// the device drains meanwhile. The ring stays in the processor's cache, so the model is read at the
// memory's speed. Blocks that only need a fingerprint are read while all buffers are full, and at
// the end, so the link never waits for them. One more thread leads those of the pool.
class HostIntake {
 public:
  // Buffers that the device reads, or is about to, while threads fill the others.
  static constexpr std::size_t kTaking = 3;
  static constexpr Bytes kValueAlignment = 256_B;  // at which values of a parameter begin in one

  // `comparison`: gets the fingerprints; null: nothing is compared. `phase` records the moved
  // bytes. `at_once`: there is room for all of the engine's weights, so they need not grow unit by
  // unit. `ring`: more than kTaking buffers of at least kBlock.
  HostIntake(engine::Engine& engine, ThreadPool& threads, Comparison* comparison,
             engine::InitReport::Phase& phase, bool at_once,
             const checkpoint::RingOptions& ring = {})
      : engine_(engine),
        threads_(threads),
        comparison_(comparison),
        phase_(phase),
        at_once_(at_once),
        ring_options_(ring) {
    STRATA_ASSERT(ring.buffers > static_cast<int>(kTaking) && ring.buffer_bytes >= kBlock);
  }

  // Adds the values of `param` from element `begin` on; contiguous. With a comparison they must be
  // the whole parameter.
  void add(int param, Numel begin, const at::Tensor& values) {
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
  // Moves all added values. When it returns, the device may still be copying. `stored`: called when
  // all values that this rank keeps have been stored, before the rest is fingerprinted.
  void flush(const std::function<void()>& stored = {}) {
    {
      Filling filling(*this);  // looks, until there are buffers
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
  // Whether units that stay whole have all values; false if other ranks' parts are missing.
  bool complete() const { return complete_; }

 private:
  // The bytes that one thread reads at once.
  struct Block {
    std::span<const std::byte> bytes;  // to fingerprint
    char* fingerprint;                 // null: not wanted
    std::span<const std::byte> kept;   // the part of them that goes to the buffer
    std::size_t turn;                  // of kept bytes: whose buffer
    std::size_t at;                    // and where in it
  };
  struct Store {
    int param;
    Numel begin;
    Numel count;
    std::size_t at;  // in the buffer
    DType dtype;
  };
  // The blocks that go through one buffer.
  struct Turn {
    std::int64_t blocks = 0;
    std::vector<Store> stores;
    std::size_t used = 0;  // bytes of the buffer
  };
  // Threads that fill buffers in the order of turns, as the ring opens them.
  class Filling final : public checkpoint::Source {
   public:
    explicit Filling(HostIntake& intake)
        : turns_(intake.turns_),
          blocks_(intake.blocks_),
          looks_(intake.looks_),
          buffers_(intake.turns_.size()),
          left_(std::make_unique<std::atomic<std::int64_t>[]>(intake.turns_.size())) {
      for (std::size_t i = 0; i < intake.turns_.size(); ++i) left_[i] = intake.turns_[i].blocks;
      leader_ = std::jthread([this, &threads = intake.threads_] {
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

    // If not all turns were opened, there has been an error: blocks that were not begun are
    // dropped.
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
    std::unique_ptr<io::Transfer> fill(checkpoint::Piece& /*piece*/,
                                       std::span<std::byte> buffer) override {
      buffers_[opened_] = buffer.data();
      ++opened_;
      opened_.notify_all();
      return nullptr;  // filled() waits; the buffers outlive the threads, which this object joins
    }
    void filled(const checkpoint::Piece& piece) override {
      std::atomic<std::int64_t>& left = left_[piece.index];
      for (std::int64_t blocks = left; blocks > 0; blocks = left) left.wait(blocks);
    }

   private:
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
  class TurnSink final : public checkpoint::Sink {
   public:
    explicit TurnSink(HostIntake& intake) : intake_(intake), weights_(intake.engine_.weights()) {}

    device::Stream* stream() override { return &intake_.engine_.device().compute_stream(); }
    std::unique_ptr<io::Transfer> take(const checkpoint::Piece& piece) override {
      if (piece.index == 0 && intake_.at_once_) weights_.back_all();  // while buffers are filled
      for (const Store& store : intake_.turns_[piece.index].stores) {
        weights_.enqueue_store(store.param, store.begin, store.count,
                               piece.content.data() + store.at, store.dtype, &owed_);
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

  void keep(int param, Numel begin, Numel count, Block block, DType dtype) {
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
    if (next_store(turn))
      turn.stores.back().count += count;
    else
      turn.stores.push_back({param, begin, count, block.at, dtype});
    turn.used = block.at + block.kept.size();
    ++turn.blocks;
    blocks_.push_back(block);
  }

  engine::Engine& engine_;
  ThreadPool& threads_;
  Comparison* comparison_;
  engine::InitReport::Phase& phase_;
  bool at_once_;
  checkpoint::RingOptions ring_options_;
  std::optional<checkpoint::TransferRing> ring_;  // none until something is kept
  std::vector<Turn> turns_;
  std::vector<Block> blocks_;  // to be kept, in the order of their turns
  std::vector<Block> looks_;   // only to be fingerprinted
  bool complete_ = true;
};

// A contiguous tensor like this one on the host, with undefined contents. A large one lies in huge
// pages, which the system provides faster.
inline at::Tensor empty_on_host(const at::Tensor& like) {
  const auto options = at::TensorOptions().dtype(like.scalar_type());
  const Bytes bytes(like.nbytes());
  if (bytes < memory::kHugePageSize) return at::empty(like.sizes(), options);
  auto memory = std::make_shared<memory::HostBuffer>(bytes);
  void* const data = memory->data();
  return at::from_blob(
      data, like.sizes(), [memory = std::move(memory)](void*) mutable { memory.reset(); }, options);
}

// Copies values from the device to ordinary host memory. The device fills one buffer while several
// threads empty earlier ones, and thereby touch the pages of the target for the first time.
class HostExport {
  // The targets are new memory, whose pages the system allocates at the first write. Parts and
  // buffers are larger than for other copies, so that many threads touch new pages at once and few
  // of them the same huge page.
  static constexpr checkpoint::RingOptions kRing{4, 16_MiB};
  static constexpr std::int64_t kCopied = (1_MiB).value;  // bytes that one thread copies at once

 public:
  // Records the moved bytes in `phase`.
  HostExport(engine::Engine& engine, ThreadPool& threads, engine::InitReport::Phase& phase)
      : engine_(engine), threads_(threads), phase_(phase), ring_(kRing, engine.device()) {}

  // Both spans have the same length.
  void add(std::span<std::byte> target, std::span<const std::byte> source) {
    STRATA_ASSERT(target.size() == source.size());
    while (!source.empty()) {
      const std::size_t count = std::min(source.size(), ring_.buffer_bytes().size());
      parts_.push_back({target.first(count), source.first(count)});
      target = target.subspan(count);
      source = source.subspan(count);
    }
  }
  // Returns when all that was added has been copied.
  void flush() {
    PartSource source(*this);
    checkpoint::Taker sink([this](const checkpoint::Piece& piece) {
      std::byte* const target = parts_[piece.index].target.data();
      threads_.parallel_for(piece.bytes.value, kCopied, [&](std::int64_t begin, std::int64_t end) {
        std::memcpy(target + begin, piece.content.data() + begin,
                    static_cast<std::size_t>(end - begin));
      });
      phase_.moved(piece.bytes);
      return nullptr;
    });
    copy(source, sink, ring_);
    parts_.clear();
  }

 private:
  struct Part {  // at most a buffer
    std::span<std::byte> target;
    std::span<const std::byte> source;
  };
  class PartSource final : public checkpoint::Source {
   public:
    explicit PartSource(HostExport& way) : way_(way) {}

    bool next(checkpoint::Piece& piece) override {
      if (next_ == way_.parts_.size()) return false;
      piece.bytes = Bytes(way_.parts_[next_++].source.size());
      return true;
    }
    device::Stream* stream() override { return &way_.engine_.device().compute_stream(); }
    std::unique_ptr<io::Transfer> fill(checkpoint::Piece& piece, std::span<std::byte>) override {
      way_.engine_.device().copy(piece.content, way_.parts_[piece.index].source, *stream());
      return nullptr;
    }

   private:
    HostExport& way_;
    std::size_t next_ = 0;
  };

  engine::Engine& engine_;
  ThreadPool& threads_;
  engine::InitReport::Phase& phase_;
  checkpoint::TransferRing ring_;
  std::vector<Part> parts_;
};

}  // namespace strata::torch

// Compares a live model's values over the ranks, and copies them between the host and the engine's
// device, through a ring of pinned buffers: the Sources and Sinks of checkpoint/pipeline.h. Work is
// in order with the current stream. Threads: the engine's, and those of the pool. Ownership:
// borrows all; sources, values and targets until flush(). Errors: OutOfMemoryError for the buffers,
// or as the engine's memory grows.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/engine/engine.h"
#include "strata/torch/model/model_plan.h"

namespace strata::torch {

inline constexpr std::size_t kFingerprintBytes = 16;

inline constexpr Bytes kBlock = 1_MiB;

// How many blocks a tensor of `bytes` is cut into.
std::size_t block_count(Bytes bytes);

// Fingerprints of the blocks of tensors' bytes, many tensors at a time. The bits do not depend on
// where a tensor lies. Borrows bytes and targets until flush().
class Fingerprints {
 public:
  // `device`: of tensors that are not on the host.
  Fingerprints(device::Device& device, ThreadPool& threads) : device_(device), threads_(threads) {}

  // Fingerprints of the blocks of these bytes go to `target`, one after the other.
  void add(std::span<const std::byte> bytes, bool on_host, std::span<char> target);
  // Computes the fingerprints of all added bytes.
  void flush();

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
  Comparison(comm::Collectives& collectives, const std::vector<ModelParameter>& parameters);

  // Whether ranks compare at all: there is more than one.
  bool wanted() const { return collectives_.world_size() > 1; }
  // Whether this is rank 0, with which the others are compared. It gives fingerprints of all blocks
  // except those that it alone keeps, the others of those of which they keep a part.
  bool is_reference() const { return wanted() && collectives_.rank() == 0; }

  // The place for this rank's fingerprints of `count` blocks of the parameter from `first` on.
  std::span<char> place_for(int param, std::size_t first, std::size_t count);
  // Collective; called when all fingerprints have been written.
  void exchange();

  // Whether any block differs; valid after exchange(), and the same on every rank.
  bool any() const { return any_; }
  // The parameter's blocks as runs [begin, end), which differ as a whole or not; those that differ
  // have at most `most`.
  struct Run {
    std::size_t begin;
    std::size_t end;
    bool differs;
  };
  std::vector<Run> runs(int param, std::size_t most) const;

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

  // `comparison`: gets the fingerprints; null: nothing is compared. `phase` records the moved
  // bytes. `at_once`: there is room for all of the engine's weights, so they need not grow unit by
  // unit. `ring`: more than kTaking buffers of at least kBlock.
  HostIntake(engine::Engine& engine, ThreadPool& threads, Comparison* comparison,
             engine::InitReport::Phase& phase, bool at_once,
             const checkpoint::RingOptions& ring = {});

  // Adds the values of `param` from element `begin` on; contiguous. With a comparison they must be
  // the whole parameter.
  void add(int param, Numel begin, const at::Tensor& values);
  // Moves all added values. When it returns, the device may still be copying. `stored`: called when
  // all values that this rank keeps have been stored, before the rest is fingerprinted.
  void flush(const std::function<void()>& stored = {});
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
  class Filling;
  class TurnSink;

  void keep(int param, Numel begin, Numel count, Block block, DType dtype);

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
at::Tensor empty_on_host(const at::Tensor& like);

// Copies values from the device to ordinary host memory. The device fills one buffer while several
// threads empty earlier ones, and thereby touch the pages of the target for the first time.
class HostExport {
 public:
  // Records the moved bytes in `phase`.
  HostExport(engine::Engine& engine, ThreadPool& threads, engine::InitReport::Phase& phase);

  // Both spans have the same length.
  void add(std::span<std::byte> target, std::span<const std::byte> source);
  // Returns when all that was added has been copied.
  void flush();

 private:
  struct Part {  // at most a buffer
    std::span<std::byte> target;
    std::span<const std::byte> source;
  };
  class PartSource;

  engine::Engine& engine_;
  ThreadPool& threads_;
  engine::InitReport::Phase& phase_;
  checkpoint::TransferRing ring_;
  std::vector<Part> parts_;
};

}  // namespace strata::torch

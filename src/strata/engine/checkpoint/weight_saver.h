// Saves the weights as a Hugging Face checkpoint folder while they stay sharded: one unit at a time
// is gathered, and rank 0 writes it through a checkpoint::Pipeline. Where gathers are one-sided
// only rank 0 gathers. Tensors of the checkpoint are made of runs of parameters (one usually; one
// an expert's slice of a fused weight), or their bytes are given by write(). Until finish() has
// succeeded the folder keeps its earlier checkpoint, and a saver that is destroyed before leaves no
// trace.
//
// Threads: the engine's. Units: elements. Memory: the largest unit, and the ring, on rank 0 (every
// rank where gathers are collectives). Errors: UsageError for tensors whose pieces do not fill
// them; what fails on rank 0 (a full disk) fails on every rank, at the latest in finish().
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strata/checkpoint/pipeline.h"
#include "strata/engine/engine.h"
#include "strata/format/sharded_writer.h"
#include "strata/io/io_engine.h"

namespace strata::engine {

// Elements [begin, begin + numel) of a parameter.
struct SavedRange {
  int param = 0;
  Numel begin;
  Numel numel;
};

// A tensor of the checkpoint: its pieces follow each other. Without pieces: given by write().
struct SavedTensor {
  format::TensorSpec spec;
  std::vector<SavedRange> pieces;  // of parameters of the dtype that the spec says
};

struct WeightSaverOptions {
  Bytes shard_max = 5'000'000'000_B;
  checkpoint::RingOptions staging;
};

class WeightSaver {
 public:
  // Collective. All ranks bring the same tensors. Checks them, takes the space on the disk.
  WeightSaver(Engine& engine, std::string folder, std::vector<SavedTensor> tensors,
              io::IoEngine& io, const WeightSaverOptions& options = {});
  ~WeightSaver();

  // Collective: writes every tensor that has pieces.
  void write_pieces();
  // The whole bytes of a tensor without pieces, by its index. Only rank 0's bytes
  // count.
  void write(std::size_t tensor, std::span<const std::byte> bytes);
  // Collective: brings everything to disk and gives it its names.
  void finish();

 private:
  // A run of a unit's flat buffer, and its place in a tensor.
  struct Run {
    int unit = 0;
    int param = 0;
    Numel flat_begin;
    Numel numel;
    std::size_t tensor = 0;
    Numel tensor_begin;
  };

  void check_tensor(const SavedTensor& tensor) const;
  void plan_runs();
  bool gathers() const { return writes_ || !engine_.collectives().traits().one_sided; }
  std::span<const std::byte> gather(const Unit& unit);
  // Gives the run's elements to the pipeline, in logical order.
  void write_run(const Run& run, std::span<const std::byte> flat, DType dtype);
  // On rank 0, unless it has failed before. Keeps the error for finish().
  void attempt(const std::function<void()>& step);

  struct Output;

  Engine& engine_;
  std::vector<SavedTensor> tensors_;
  bool writes_;
  std::vector<Run> runs_;  // by unit and place in it
  ShardGather shard_gather_;
  std::unique_ptr<device::Memory> gathered_;
  std::unique_ptr<Output> output_;  // of rank 0
  std::exception_ptr failure_;      // of rank 0, until every rank is told
};

}  // namespace strata::engine

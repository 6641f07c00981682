// Loads weights from a checkpoint, or from what is read like one: each rank reads the ranges of the
// files that its own shards hold, in the order of the files, and casts them where the dtypes
// differ; through the page cache or past it, whichever is faster here (checkpoint/reader.h).
// Not a collective, that choice included; load_weights_together() below is what all ranks do
// together. Threads: the engine's. Memory: a TransferRing, whatever the model's size, its own or
// one that is lent, and a few words a range.
// Errors: IoError (the shards hold a mixture then: load again or give the engine up), UsageError
// for a map of other parameters.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/checkpoint/reader.h"
#include "strata/engine/engine.h"
#include "strata/format/weight_map.h"
#include "strata/io/io_engine.h"
#include "strata/kernels/recipe.h"

namespace strata::engine {

// Every parameter is the tensor of its name: for a WeightMap.
std::vector<format::ParamSources> whole_tensors(std::span<const plan::ParamSpec> params);

// One read of a file, and the copies that it serves: pieces [first_piece, first_piece +
// piece_count).
struct ReadBatch {
  std::size_t file = 0;
  Bytes offset;
  Bytes bytes;  // up to the end of its last piece
  std::size_t first_piece = 0;
  std::size_t piece_count = 0;
};

struct ReadPlan {
  std::vector<format::RangeCopy> pieces;  // none larger than a buffer
  std::vector<ReadBatch> batches;
};

// Cuts what is larger than a buffer, and reads neighbours together. `copies` by file and offset.
// Every piece lies in its buffer at a multiple of its element's size. Reads begin at multiples of
// `block`, which divides a buffer of at least two of them, except those of elements that do not lie
// at multiples of their size in the file. Pure.
ReadPlan plan_reads(std::span<const format::RangeCopy> copies, Bytes buffer_bytes,
                    Bytes block = 1_B);

struct LoadedBytes {
  Bytes read;  // of the files
  // How they were read; kAuto: there was nothing to choose for.
  checkpoint::ReadWay way = checkpoint::ReadWay::kAuto;
};

// The files to read, and how.
struct LoadSource {
  std::vector<const io::File*> files;  // by the map's file
  const format::WeightMap& map;
  std::span<const int> params;  // by the map's parameters, their indices in the engine
  io::IoEngine& io;
  checkpoint::RingOptions staging = {};
  std::optional<checkpoint::ReadWay> way = checkpoint::ReadWay::kAuto;  // nullopt: there is but one
  std::string phase = "read";
  const checkpoint::Verification* verify = nullptr;
  Bytes block = 1_B;  // that is verified at once: a power of two that divides a buffer
  // The source has the elements of channels_last parameters in the order of their slots.
  bool in_slot_order = false;
  // Several loads, one after the other, share the ring that the first one makes. Null: a ring of
  // its own.
  std::optional<checkpoint::TransferRing>* kept_ring = nullptr;
};

// A parameter whose elements come in the other order than its slot's. They are stored when all are
// there.
struct Reordering {
  int param = 0;              // of the engine
  bool channels_last = true;  // that is the slot's order
};

// Where what is read goes.
class ValueSink {
 public:
  virtual ~ValueSink() = default;
  // The ranges of the map's parameters that this rank keeps; of those with a reordering all
  // elements, where it keeps any.
  virtual std::vector<format::ParamRange> wanted() const = 0;
  // Queues on the compute stream: the elements have these values. The source stays until the stream
  // has come so far.
  virtual void enqueue_store(std::size_t param, Numel begin, Numel numel, const std::byte* source,
                             DType source_dtype) = 0;
  // Absent: the elements come in the slot's order. Else enqueue_store() gets them in that.
  virtual std::optional<Reordering> reordering(std::size_t /*param*/) const { return std::nullopt; }
  // Queues what the stores so far have left to do.
  virtual void settle() {}
};

// `sync_points`: places in the files. Told to the engine's init report: the phase of the source,
// and, where there are ways, the choice and the phase "probe".
LoadedBytes load_weights(Engine& engine, const LoadSource& source,
                         const checkpoint::SyncPoints* sync_points = nullptr);
// The same into another sink; the source's `params` are not looked at.
LoadedBytes load_values(Engine& engine, const LoadSource& source, ValueSink& sink,
                        const checkpoint::SyncPoints* sync_points = nullptr);

// Loading a checkpoint on all ranks at once. Units that stay whole are gathered while the files are
// still read: a few places of the files, the same on every rank, are sync points. There the ranks
// begin to gather the units that all of them have read their parts of, over the link between
// devices, which reading leaves idle. Collective; outcomes are agreed on (engine/unit/agreement.h).
// Threads: the engine's. Errors: those of load_weights(), on every rank, of the first rank that had
// one; UsageError where a rank has a sharded unit in use: nothing is stored then; CommError.

// A sync point, and the units that lie in the files before it and not before the one before.
struct GatherPoint {
  format::FileOffset place;
  std::vector<int> units;
};

// In the order of places, of at least `enough` bytes of whole units each. Units of which the map
// does not have every parameter are in none, nor are the last ones: nothing would be read beside
// them. Pure, the same on every rank.
std::vector<GatherPoint> plan_gather_points(const Weights& weights, const format::WeightMap& map,
                                            std::span<const int> params, Bytes enough);

// Follow with Engine::weights_changed(), which gathers the rest; until then no rank stores to
// the map's parameters. `enough`: of plan_gather_points(); nullopt: an eighth of the model.
LoadedBytes load_weights_together(Engine& engine, const LoadSource& source,
                                  std::optional<Bytes> enough = std::nullopt);

// Values that are made where they are kept: recipes (kernels/recipe.h) are replayed piece by piece,
// each rank what its shards hold, so that no parameter is ever whole anywhere. Two pieces of host
// memory are all that this takes: one is filled while the device has the other.
// Threads: the engine's, and those of the pool. Errors, on every rank: OutOfMemoryError for the
// pieces or as the engine's memory grows; what the stores of offloaded weights throw; CommError.

struct ParamRecipe {
  int param = 0;
  kernels::Recipe recipe;
  DType dtype = DType::kFloat32;  // of the values, before they become weights
};

// Collective. Follow with Engine::weights_changed(). `piece`: of values, of one element at least.
void replay_weights(Engine& engine, std::span<const ParamRecipe> recipes, Bytes piece,
                    ThreadPool& threads);

}  // namespace strata::engine

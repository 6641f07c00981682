// Loads weights from a checkpoint, or from what is read like one: each rank reads the ranges of the
// files that its own shards hold, in the order of the files, through the page cache or past it,
// whichever is faster here (checkpoint/reader.h), and casts them where the dtypes differ. Not
// collective, but for load_weights_together() and replay_weights(). Threads: the engine's. Memory:
// a TransferRing, its own or one that is lent, and a few words a range. Errors: IoError (the shards
// hold a mixture then: load again or give the engine up), UsageError for a map of other parameters.
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

// Reads of files, and the copies that they serve.
struct ReadPlan {
  std::vector<format::RangeCopy> pieces;     // none larger than a buffer
  std::vector<checkpoint::FileRange> reads;  // up to the end of their last pieces
  std::vector<std::size_t> ends;             // by read: behind its last piece
};

// Cuts what is larger than a buffer, and reads neighbours together. `copies` by file and offset.
// Pieces lie in their buffers at multiples of their elements' sizes. Reads begin at multiples of
// `block`, which divides a buffer of at least two of them, except for elements that do not lie at
// multiples of their size in the file. Pure.
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
  // Loads one after the other share the ring that the first one makes. Null: a ring of its own.
  std::optional<checkpoint::TransferRing>* kept_ring = nullptr;
};

// A parameter of the engine that is loaded. If `reordered`, its elements come in the other order
// than its slot's (plan/param_spec.h). Neighbours in one order are far apart in the other, so
// the loader keeps the elements on the host until all are there; weights of convolutions are small.
// UsageError where its pieces differ in dtype.
struct LoadedParam {
  int param = 0;
  bool reordered = false;
  std::int64_t each = 1;  // elements for which the source has one number
};

// The ranges of each that this rank wants: the elements that it owns, or all if they have to be
// reordered and it owns any.
std::vector<format::ParamRange> wanted_ranges(const Weights& weights,
                                              std::span<const LoadedParam> params);

// Where what is read goes.
struct ValueSink {
  std::span<const LoadedParam> params;  // by the map's parameter
  // Queues a store on the compute stream, of elements in the slot's order. The source stays until
  // the stream has come so far.
  std::function<void(std::size_t param, Numel begin, Numel numel, const std::byte* source,
                     DType source_dtype)>
      enqueue_store;
  // Queues what the stores so far have left to do. May be empty.
  std::function<void()> settle = nullptr;
};

// `sync_points`: places in the files. Told to the engine's init report: the phase of the source,
// and, where there are ways, the choice and the phase "probe".
LoadedBytes load_weights(Engine& engine, const LoadSource& source,
                         const checkpoint::SyncPoints* sync_points = nullptr);
// The same into another sink; the source's `params` are not looked at.
LoadedBytes load_values(Engine& engine, const LoadSource& source, const ValueSink& values,
                        const checkpoint::SyncPoints* sync_points = nullptr);

// On all ranks at once, units that stay whole are gathered while the files are still read: at a few
// sync points, the same offsets on every rank, the ranks begin to gather the units that all of them
// have read, over the link between devices, which reading leaves idle.

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

// Collective. Follow with Engine::weights_changed(), which gathers the rest; until then no rank
// stores to the map's parameters. `enough`: of plan_gather_points(); nullopt: an eighth of the
// model. Errors: those of load_weights(), on every rank, of the first rank that had one; UsageError
// where a rank has a sharded unit in use: nothing is stored then; CommError.
LoadedBytes load_weights_together(Engine& engine, const LoadSource& source,
                                  std::optional<Bytes> enough = std::nullopt);

struct ParamRecipe {
  int param = 0;
  kernels::Recipe recipe;
  DType dtype = DType::kFloat32;  // of the values, before they become weights
};

// Collective: replays recipes (kernels/recipe.h) piece by piece, each rank what its shards hold, so
// that no parameter is ever whole anywhere; one piece of host memory is filled while the device has
// the other. Follow with Engine::weights_changed(). `piece`: of values, of one element at least.
// Threads: the engine's, and those of the pool. Errors, on every rank: OutOfMemoryError for the
// pieces or as the engine's memory grows; what the stores of offloaded weights throw; CommError.
void replay_weights(Engine& engine, std::span<const ParamRecipe> recipes, Bytes piece,
                    ThreadPool& threads);

}  // namespace strata::engine

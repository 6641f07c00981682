// Loads weights from a checkpoint, or from what is read like one: each rank reads the ranges of the
// files that its own shards hold, in the order of the files, and casts them where the dtypes
// differ; through the page cache or past it, whichever is faster here (checkpoint/read_choice.h).
// Not a collective, that choice included; engine/checkpoint/joint_loading.h is what all ranks do
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

#include "strata/checkpoint/pipeline.h"
#include "strata/checkpoint/reader.h"
#include "strata/engine/engine.h"
#include "strata/format/weight_map.h"
#include "strata/io/io_engine.h"

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

}  // namespace strata::engine

#include "strata/engine/weight_loader.h"

#include <algorithm>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

// Unwanted bytes between two wanted ranges that are read along, which is cheaper than another read.
constexpr Bytes kGapMax = 16_KiB;

Bytes bytes_of_copy(const format::RangeCopy& copy) {
  return bytes_of(copy.numel, copy.source_dtype);
}

void add_piece(ReadPlan& plan, const format::RangeCopy& piece, Bytes buffer_bytes) {
  const Bytes end = piece.offset + bytes_of_copy(piece);
  if (!plan.batches.empty()) {
    ReadBatch& last = plan.batches.back();
    const Bytes last_end = last.offset + last.bytes;
    if (last.file == piece.file && piece.offset >= last_end && piece.offset - last_end <= kGapMax &&
        end - last.offset <= buffer_bytes &&
        (piece.offset - last.offset) % size_of(piece.source_dtype) == Bytes()) {
      last.bytes = end - last.offset;
      ++last.piece_count;
      plan.pieces.push_back(piece);
      return;
    }
  }
  plan.batches.push_back({piece.file, piece.offset, bytes_of_copy(piece), plan.pieces.size(), 1});
  plan.pieces.push_back(piece);
}

std::vector<format::ParamRange> owned_ranges(const Weights& weights, std::span<const int> params) {
  std::vector<format::ParamRange> ranges;
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (params[i] < 0 || params[i] >= weights.param_count()) {
      throw UsageError(fmt::format("the model has no parameter {}; it has {}", params[i],
                                   weights.param_count()));
    }
    const auto [begin, end] = weights.owned_range(params[i]);
    if (begin < end) ranges.push_back({i, begin, end});
  }
  return ranges;
}

}  // namespace

ReadPlan plan_reads(std::span<const format::RangeCopy> copies, Bytes buffer_bytes) {
  ReadPlan plan;
  for (const format::RangeCopy& copy : copies) {
    const Numel largest(buffer_bytes / size_of(copy.source_dtype));
    for (Numel done; done < copy.numel; done += largest) {
      format::RangeCopy piece = copy;
      piece.numel = std::min(largest, copy.numel - done);
      piece.offset += bytes_of(done, copy.source_dtype);
      piece.param_begin += done;
      add_piece(plan, piece, buffer_bytes);
    }
  }
  return plan;
}

LoadedBytes load_weights(Engine& engine, const format::CheckpointIndex& checkpoint,
                         const format::WeightMap& map, std::span<const int> params,
                         io::IoEngine& io, const StagingOptions& staging) {
  Weights& weights = engine.weights();
  const ReadPlan plan =
      plan_reads(map.intersect(owned_ranges(weights, params)), staging.buffer_bytes);
  device::Stream& stream = engine.device().compute_stream();
  StagingRing ring(staging, engine.device());
  const auto start = [&](std::size_t turn) {
    if (turn >= plan.batches.size()) return;
    const ReadBatch& batch = plan.batches[turn];
    const auto target = ring.buffer(turn).first(batch.bytes.size());
    ring.started(turn, io.read(checkpoint.files()[batch.file].file(), batch.offset, target));
  };
  for (std::size_t turn = 0; turn < ring.size(); ++turn) start(turn);
  // A buffer is read into again some turns after its bytes were queued, when the device has taken
  // them.
  const std::size_t lag = ring.size() / 4;
  LoadedBytes loaded;
  Bytes total;
  for (const ReadBatch& batch : plan.batches) total += batch.bytes;
  InitReport::Phase phase(engine.init_report(), "read", total);
  for (std::size_t turn = 0; turn < plan.batches.size(); ++turn) {
    const ReadBatch& batch = plan.batches[turn];
    const std::span<std::byte> bytes = ring.buffer(turn);
    for (std::size_t i = 0; i < batch.piece_count; ++i) {
      const format::RangeCopy& piece = plan.pieces[batch.first_piece + i];
      weights.enqueue_store(params[piece.param], piece.param_begin, piece.numel,
                            bytes.data() + (piece.offset - batch.offset).size(),
                            piece.source_dtype);
    }
    ring.used_until(turn, stream.record());
    loaded.read += batch.bytes;
    phase.moved(batch.bytes);
    if (turn >= lag) start(turn - lag + ring.size());
  }
  stream.synchronize();
  return loaded;
}

}  // namespace strata::engine

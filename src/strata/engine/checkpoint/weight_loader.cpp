#include "strata/engine/checkpoint/weight_loader.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "strata/base/error.h"
#include "strata/checkpoint/ring.h"
#include "strata/engine/checkpoint/reordering_sink.h"
#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

// Unwanted bytes between two wanted ranges that are read along, which is cheaper than another read.
constexpr Bytes kGapMax = 16_KiB;

Bytes bytes_of_copy(const format::RangeCopy& copy) {
  return bytes_of(copy.numel, copy.source_dtype);
}

// How far into its block a read begins that must not.
Bytes past_block(const format::RangeCopy& copy, Bytes block) {
  const bool aligned = copy.offset % size_of(copy.source_dtype) == Bytes();
  return aligned ? copy.offset % block : Bytes();
}

void add_piece(ReadPlan& plan, const format::RangeCopy& piece, Bytes buffer_bytes, Bytes block) {
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
  const Bytes begin = piece.offset - past_block(piece, block);
  plan.batches.push_back({piece.file, begin, end - begin, plan.pieces.size(), 1});
  plan.pieces.push_back(piece);
}

// The weights; masters are made of many stores at once.
class WeightSink final : public ValueSink {
 public:
  WeightSink(Weights& weights, std::span<const int> params, bool in_slot_order)
      : weights_(weights), params_(params), in_slot_order_(in_slot_order) {}

  std::vector<format::ParamRange> wanted() const override {
    std::vector<format::ParamRange> ranges;
    for (std::size_t i = 0; i < params_.size(); ++i) {
      if (params_[i] < 0 || params_[i] >= weights_.param_count()) {
        throw UsageError(fmt::format("the model has no parameter {}; it has {}", params_[i],
                                     weights_.param_count()));
      }
      add_wanted(ranges, weights_, i, params_[i], reordering(i).has_value());
    }
    return ranges;
  }
  std::optional<Reordering> reordering(std::size_t param) const override {
    if (in_slot_order_ || !weights_.param(params_[param]).reordered()) return std::nullopt;
    return Reordering{params_[param]};
  }
  void enqueue_store(std::size_t param, Numel begin, Numel numel, const std::byte* source,
                     DType source_dtype) override {
    weights_.enqueue_store(params_[param], begin, numel, source, source_dtype, &owed_);
  }
  void settle() override { weights_.make_masters(owed_); }

 private:
  Weights& weights_;
  std::span<const int> params_;
  bool in_slot_order_;
  OwedMasters owed_;
};

// The files that some copies come from, for both ways of reading them.
class Files {
 public:
  Files(const LoadSource& source, std::span<const format::RangeCopy> copies)
      : direct_(source.files.size()), ways_(direct_.size()) {
    using checkpoint::ReadWay;
    const bool buffered = source.way.value_or(ReadWay::kBuffered) == ReadWay::kBuffered;
    for (const format::RangeCopy& copy : copies) {
      ranges_.push_back({copy.file, copy.offset, bytes_of_copy(copy)});
      checkpoint::ReadableFile& ways = ways_[copy.file];
      if (ways.buffered != nullptr) continue;
      ways.buffered = ways.direct = source.files[copy.file];
      if (buffered) continue;
      ways.direct = &direct_[copy.file].emplace(ways.buffered->direct());
    }
  }

  std::span<const checkpoint::ReadableFile> ways() const { return ways_; }
  checkpoint::ReadChoice choose(checkpoint::ReadWay way, io::IoEngine& io,
                                checkpoint::TransferRing& ring) const {
    // Into smaller buffers nothing could be read that begins within a block.
    const bool fits = ring.buffer_bytes() >= io::File::kDirectBlock * 2 &&
                      ring.buffer_bytes() % io::File::kDirectBlock == Bytes();
    if (!fits) return checkpoint::choose_read(way, {});
    return checkpoint::ReadProbe(ways_, ranges_).choose(way, io, ring);
  }

 private:
  std::vector<std::optional<io::File>> direct_;
  std::vector<checkpoint::ReadableFile> ways_;
  std::vector<checkpoint::FileRange> ranges_;
};

std::vector<checkpoint::FileRange> ranges_of(const ReadPlan& plan) {
  std::vector<checkpoint::FileRange> ranges;
  for (const ReadBatch& batch : plan.batches)
    ranges.push_back({batch.file, batch.offset, batch.bytes});
  return ranges;
}

class BatchSink final : public checkpoint::Sink {
 public:
  BatchSink(Engine& engine, const ReadPlan& plan, ValueSink& values, InitReport::Phase& phase)
      : engine_(engine), plan_(plan), values_(values), phase_(phase) {}

  device::Stream* stream() override { return &engine_.device().compute_stream(); }
  std::unique_ptr<io::Transfer> take(const checkpoint::Piece& piece) override {
    const ReadBatch& batch = plan_.batches[piece.index];
    for (std::size_t i = 0; i < batch.piece_count; ++i) {
      const format::RangeCopy& copy = plan_.pieces[batch.first_piece + i];
      values_.enqueue_store(copy.param, copy.param_begin, copy.numel,
                            piece.content.data() + (copy.offset - batch.offset).size(),
                            copy.source_dtype);
    }
    phase_.moved(batch.bytes);
    return nullptr;
  }
  void settle() override { values_.settle(); }

 private:
  Engine& engine_;
  const ReadPlan& plan_;
  ValueSink& values_;
  InitReport::Phase& phase_;
};

// `reads`: there is something to read, so that the choice is told.
checkpoint::ReadChoice choose_way(InitReport& report, const LoadSource& source, const Files& files,
                                  checkpoint::TransferRing& ring, bool reads) {
  if (!source.way) return {};
  const InitReport::Phase phase(report, "probe", {});
  const checkpoint::ReadChoice choice = files.choose(*source.way, source.io, ring);
  if (reads) report.reading = choice;
  return choice;
}

constexpr std::string_view kReading = "reading the weights";
constexpr std::int64_t kSyncPoints = 8;  // each costs the skew between ranks

// Whole units of which the map has every parameter, by the places at which they end.
std::vector<std::pair<format::FileOffset, int>> whole_units_by_end(const Weights& weights,
                                                                   const format::WeightMap& map,
                                                                   std::span<const int> params) {
  std::vector<std::size_t> missing;
  std::vector<std::pair<format::FileOffset, int>> ends;
  for (const Unit& unit : weights.units()) {
    missing.push_back(unit.spec.params.size());
    ends.emplace_back(format::FileOffset{}, unit.id);
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (params[i] < 0 || params[i] >= weights.param_count()) continue;  // load_weights() tells
    const auto unit = static_cast<std::size_t>(weights.unit_of(params[i]).id);
    --missing[unit];
    ends[unit].first = std::max(ends[unit].first, map.end_of(i));
  }
  std::erase_if(ends, [&](const auto& end) {
    const auto unit = static_cast<std::size_t>(end.second);
    return missing[unit] > 0 || !weights.units()[unit].whole;
  });
  std::ranges::sort(ends);
  return ends;
}

Bytes whole_bytes(const Weights& weights) {
  Bytes bytes;
  for (const Unit& unit : weights.units()) bytes += Bytes(unit.resident.size());
  return bytes;
}

LoadedBytes load_with_sync_points(Engine& engine, const LoadSource& source, Bytes enough,
                                  const std::function<void()>& sync) {
  const comm::ShardPosition place = engine.collectives().shard_position();
  std::vector<GatherPoint> points;
  if (place.held_count() > 1 && place.parts == 1)
    points = plan_gather_points(engine.weights(), source.map, source.params, enough);
  checkpoint::SyncPoints sync_points;
  // Peers map this memory at once, and their driver lets no first copy begin meanwhile: ranks that
  // have copied something go on beside it.
  if (!points.empty()) sync_points.begun = [&engine] { engine.weights().back_all(); };
  for (const GatherPoint& point : points) sync_points.places.push_back(point.place);
  sync_points.reached = [&](std::size_t i) {
    sync();
    engine.gather_early(points[i].units);
  };
  return load_weights(engine, source, &sync_points);
}

constexpr int kPieces = 2;

}  // namespace

std::vector<format::ParamSources> whole_tensors(std::span<const plan::ParamSpec> params) {
  std::vector<format::ParamSources> sources;
  for (const plan::ParamSpec& param : params) {
    sources.push_back({param.name,
                       param.shape,
                       param.dtype,
                       {{param.name, param.shape, Numel(), Numel(), std::nullopt}}});
  }
  return sources;
}

ReadPlan plan_reads(std::span<const format::RangeCopy> copies, Bytes buffer_bytes, Bytes block) {
  ReadPlan plan;
  for (const format::RangeCopy& copy : copies) {
    format::RangeCopy piece = copy;
    for (Numel done; done < copy.numel; done += piece.numel) {
      piece.offset = copy.offset + bytes_of(done, copy.source_dtype);
      piece.param_begin = copy.param_begin + done;
      const Bytes room = buffer_bytes - past_block(piece, block);
      piece.numel = std::min(Numel(room / size_of(copy.source_dtype)), copy.numel - done);
      add_piece(plan, piece, buffer_bytes, block);
    }
  }
  return plan;
}

LoadedBytes load_weights(Engine& engine, const LoadSource& source,
                         const checkpoint::SyncPoints* sync_points) {
  WeightSink sink(engine.weights(), source.params, source.in_slot_order);
  return load_values(engine, source, sink, sync_points);
}

LoadedBytes load_values(Engine& engine, const LoadSource& source, ValueSink& values,
                        const checkpoint::SyncPoints* sync_points) {
  ReorderingSink sink(engine, values);
  const std::vector<format::RangeCopy> copies = source.map.intersect(sink.wanted());
  const Files files(source, copies);
  std::optional<checkpoint::TransferRing> own;
  auto& kept = source.kept_ring != nullptr ? *source.kept_ring : own;
  checkpoint::TransferRing& ring = kept ? *kept : kept.emplace(source.staging, engine.device());
  const bool direct = choose_way(engine.init_report(), source, files, ring, !copies.empty()).direct;
  const Bytes block = std::max(direct ? io::File::kDirectBlock : 1_B, source.block);
  const ReadPlan plan = plan_reads(copies, ring.buffer_bytes(), block);
  const std::vector<checkpoint::FileRange> batches = ranges_of(plan);
  LoadedBytes loaded;
  for (const ReadBatch& batch : plan.batches) loaded.read += batch.bytes;
  if (source.way && !copies.empty())
    loaded.way = direct ? checkpoint::ReadWay::kDirect : checkpoint::ReadWay::kBuffered;
  InitReport::Phase phase(engine.init_report(), source.phase, loaded.read);
  checkpoint::RangeSource from(files.ways(), batches, source.io, ring.buffer_bytes(),
                               {.direct = direct, .block = block, .verify = source.verify});
  BatchSink to(engine, plan, sink, phase);
  copy(from, to, ring, {.taking = ring.size() / 4, .sync_points = sync_points});
  engine.device().compute_stream().synchronize();  // what settle() has queued
  return loaded;
}

std::vector<GatherPoint> plan_gather_points(const Weights& weights, const format::WeightMap& map,
                                            std::span<const int> params, Bytes enough) {
  const auto bytes_of_unit = [&](int unit) {
    return Bytes(weights.units()[static_cast<std::size_t>(unit)].resident.size());
  };
  std::vector<GatherPoint> points;
  Bytes since = enough;
  for (const auto& [place, unit] : whole_units_by_end(weights, map, params)) {
    if (since >= enough) {
      points.emplace_back();
      since = Bytes();
    }
    points.back().place = place;
    points.back().units.push_back(unit);
    since += bytes_of_unit(unit);
  }
  if (!points.empty()) points.pop_back();
  return points;
}

LoadedBytes load_weights_together(Engine& engine, const LoadSource& source,
                                  std::optional<Bytes> enough) {
  comm::Collectives& collectives = engine.collectives();
  engine.state_offload().require_all("loading weights");
  // No rank stores before all ranks have released their gathered units.
  agree_after(collectives, kReading, [&] { engine.gatherer().invalidate(Changed::kAll); });
  bool agreeing = false;  // what is thrown meanwhile is thrown on every rank
  const auto sync = [&](const Failure& mine) {
    agreeing = true;
    agree_on_outcome(collectives, kReading, mine);
    agreeing = false;
  };
  LoadedBytes loaded;
  try {
    Failure mine;
    try {
      if (!enough) enough = std::max(1_B, whole_bytes(engine.weights()) / kSyncPoints);
      loaded = load_with_sync_points(engine, source, *enough, [&] { sync({}); });
    } catch (const CommError&) {
      throw;  // the others know already
    } catch (...) {
      if (agreeing) throw;
      mine = failure_of(std::current_exception());
    }
    sync(mine);
  } catch (const CommError&) {
    throw;
  } catch (...) {
    engine.gatherer().abandon_lazy_gather();
    throw;
  }
  return loaded;
}

void replay_weights(Engine& engine, std::span<const ParamRecipe> recipes, Bytes piece,
                    ThreadPool& threads) {
  engine.state_offload().require_all("replaying constructors");
  agree_after(engine.collectives(), "replaying constructors", [&] {
    Weights& weights = engine.weights();
    checkpoint::TransferRing ring({kPieces, std::max(piece, 16_B)}, engine.device());
    for (const ParamRecipe& each : recipes) {
      const bool whole = weights.unit_of(each.param).whole;
      const Numel all = weights.slot_of(each.param).numel;
      const auto [begin, end] = whole ? std::pair(Numel(), all) : weights.owned_range(each.param);
      const Numel most(std::max<std::int64_t>(1, ring.buffer_bytes() / size_of(each.dtype)));
      for (Numel at = begin; at < end; at += most) {
        const Numel count = std::min(most, end - at);
        const std::size_t turn = ring.next();
        std::byte* const values = ring.buffer(turn).data();
        checkpoint::StreamUse use(ring, turn, &engine.device().compute_stream());
        kernels::replay(each.recipe, at, count, values, each.dtype, &threads);
        weights.enqueue_store_everywhere(each.param, at, count, values, each.dtype);
        use.end();
      }
    }
    engine.device().compute_stream().synchronize();
  });
}

}  // namespace strata::engine

#include "strata/engine/checkpoint/weight_loader.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

// Unwanted bytes between two wanted ranges that are read along, which is cheaper than another read.
constexpr Bytes kGapMax = 16_KiB;

// How far into its block a read begins that must not.
Bytes past_block(const format::RangeCopy& copy, Bytes block) {
  return copy.offset % size_of(copy.source_dtype) == Bytes() ? copy.offset % block : Bytes();
}

void add_piece(ReadPlan& plan, const format::RangeCopy& piece, Bytes buffer_bytes, Bytes block) {
  const Bytes end = piece.offset + piece.bytes();
  plan.pieces.push_back(piece);
  if (!plan.reads.empty()) {
    checkpoint::FileRange& last = plan.reads.back();
    const Bytes last_end = last.offset + last.bytes;
    if (last.file == piece.file && piece.offset >= last_end && piece.offset - last_end <= kGapMax &&
        end - last.offset <= buffer_bytes &&
        (piece.offset - last.offset) % size_of(piece.source_dtype) == Bytes()) {
      last.bytes = end - last.offset;
      ++plan.ends.back();
      return;
    }
  }
  const Bytes begin = piece.offset - past_block(piece, block);
  plan.reads.push_back({piece.file, begin, end - begin});
  plan.ends.push_back(plan.pieces.size());
}

// The files that some copies come from, for both ways of reading them.
class Files {
 public:
  Files(const LoadSource& source, std::span<const format::RangeCopy> copies)
      : direct_(source.files.size()), ways_(direct_.size()) {
    using checkpoint::ReadWay;
    const bool buffered = source.way.value_or(ReadWay::kBuffered) == ReadWay::kBuffered;
    for (const format::RangeCopy& copy : copies) {
      ranges_.push_back({copy.file, copy.offset, copy.bytes()});
      checkpoint::ReadableFile& ways = ways_[copy.file];
      if (ways.buffered != nullptr) continue;
      ways.buffered = ways.direct = source.files[copy.file];
      if (buffered) continue;
      ways.direct = &direct_[copy.file].emplace(ways.buffered->direct());
    }
  }

  std::span<const checkpoint::ReadableFile> ways() const { return ways_; }
  // Reports the choice where there is something to read.
  checkpoint::ReadChoice choose(InitReport& report, const LoadSource& source,
                                checkpoint::TransferRing& ring) const {
    if (!source.way) return {};
    const InitReport::Phase phase(report, "probe", {});
    // Into smaller buffers nothing could be read that begins within a block.
    const bool fits = ring.buffer_bytes() >= io::File::kDirectBlock * 2 &&
                      ring.buffer_bytes() % io::File::kDirectBlock == Bytes();
    const checkpoint::ReadChoice choice =
        fits ? checkpoint::ReadProbe(ways_, ranges_).choose(*source.way, source.io, ring)
             : checkpoint::choose_read(*source.way, {});
    if (!ranges_.empty()) report.reading = choice;
    return choice;
  }

 private:
  std::vector<std::optional<io::File>> direct_;
  std::vector<checkpoint::ReadableFile> ways_;
  std::vector<checkpoint::FileRange> ranges_;
};

// Gives what was read to the values, in the order of their slots.
class BatchSink final : public checkpoint::Sink {
 public:
  BatchSink(Engine& engine, const ReadPlan& plan, const ValueSink& values, InitReport::Phase& phase)
      : engine_(engine), plan_(plan), values_(values), phase_(phase) {}

  device::Stream* stream() override { return &engine_.device().compute_stream(); }
  std::unique_ptr<io::Transfer> take(const checkpoint::Piece& piece) override {
    const std::size_t first = piece.index == 0 ? 0 : plan_.ends[piece.index - 1];
    for (std::size_t i = first; i < plan_.ends[piece.index]; ++i) {
      const format::RangeCopy& copy = plan_.pieces[i];
      const std::byte* const source = piece.content.data() + (copy.offset - piece.offset).size();
      if (values_.params[copy.param].reordered)
        collect(copy, source);
      else
        values_.enqueue_store(copy.param, copy.param_begin, copy.numel, source, copy.source_dtype);
    }
    phase_.moved(piece.bytes);
    return nullptr;
  }
  void settle() override {
    if (values_.settle) values_.settle();
    if (queued_.empty()) return;
    engine_.device().compute_stream().synchronize();
    queued_.clear();
  }

 private:
  // Stores a parameter's elements when all are there.
  void collect(const format::RangeCopy& copy, const std::byte* source) {
    const DType dtype = copy.source_dtype;
    const int index = values_.params[copy.param].param;
    const plan::ParamSpec& param = engine_.weights().param(index);
    const auto [place, is_new] = collected_.try_emplace(copy.param, Collected{dtype, Numel(), {}});
    Collected& collected = place->second;
    if (is_new) collected.bytes.resize(bytes_of(param.numel(), dtype).size());
    if (collected.dtype != dtype)
      throw UsageError(
          "the pieces of parameter '{}', which is channels_last, are of different dtypes in the "
          "files; convert them to one; found {} and {}",
          param.name, name_of(collected.dtype), name_of(dtype));
    std::memcpy(collected.bytes.data() + bytes_of(copy.param_begin, dtype).size(), source,
                copy.bytes().size());
    collected.filled += copy.numel;
    if (collected.filled < param.numel()) return;
    plan::reorder(collected.bytes, param.shape, size_of(dtype), param.reordered());
    const auto [first, end] = engine_.weights().owned_range(index);
    queued_.push_back(std::move(collected.bytes));
    collected_.erase(place);
    values_.enqueue_store(copy.param, first, end - first,
                          queued_.back().data() + bytes_of(first, dtype).size(), dtype);
  }

  struct Collected {
    DType dtype;
    Numel filled;
    std::vector<std::byte> bytes;
  };

  Engine& engine_;
  const ReadPlan& plan_;
  const ValueSink& values_;
  InitReport::Phase& phase_;
  std::map<std::size_t, Collected> collected_;  // by parameter of the map
  std::vector<std::vector<std::byte>> queued_;  // until the device has read them
};

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

Bytes resident_bytes(const Unit& unit) {
  return Bytes(unit.resident.size());
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

std::vector<format::ParamRange> wanted_ranges(const Weights& weights,
                                              std::span<const LoadedParam> params) {
  std::vector<format::ParamRange> ranges;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto [param, reordered, each] = params[i];
    const auto [begin, end] = weights.owned_range(param);
    if (begin >= end) continue;
    ranges.push_back(reordered ? format::ParamRange{i, Numel(), weights.param(param).numel()}
                               : format::ParamRange{i, Numel(begin / each),
                                                    Numel((end.value + each - 1) / each)});
  }
  return ranges;
}

std::vector<format::ParamSources> whole_tensors(std::span<const plan::ParamSpec> params) {
  std::vector<format::ParamSources> sources;
  for (const plan::ParamSpec& param : params) {
    const format::SourceRange whole{param.name, param.shape, Numel(), Numel(), std::nullopt};
    sources.push_back({param.name, param.shape, param.dtype, {whole}});
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
  Weights& weights = engine.weights();
  std::vector<LoadedParam> params;
  for (const int param : source.params) {
    if (param < 0 || param >= weights.param_count())
      throw UsageError("the model has no parameter {}; it has {}", param, weights.param_count());
    params.push_back({param, !source.in_slot_order && weights.param(param).reordered()});
  }
  OwedMasters owed;  // they are made of many stores at once
  const auto store = [&](std::size_t i, auto... values) {
    weights.enqueue_store(params[i].param, values..., &owed);
  };
  return load_values(engine, source, {params, store, [&] { weights.make_masters(owed); }},
                     sync_points);
}

LoadedBytes load_values(Engine& engine, const LoadSource& source, const ValueSink& values,
                        const checkpoint::SyncPoints* sync_points) {
  const std::vector<format::RangeCopy> copies =
      source.map.intersect(wanted_ranges(engine.weights(), values.params));
  const Files files(source, copies);
  std::optional<checkpoint::TransferRing> own;
  auto& kept = source.kept_ring != nullptr ? *source.kept_ring : own;
  checkpoint::TransferRing& ring = kept ? *kept : kept.emplace(source.staging, engine.device());
  const bool direct = files.choose(engine.init_report(), source, ring).direct;
  const Bytes block = std::max(direct ? io::File::kDirectBlock : 1_B, source.block);
  const ReadPlan plan = plan_reads(copies, ring.buffer_bytes(), block);
  LoadedBytes loaded;
  for (const checkpoint::FileRange& read : plan.reads) loaded.read += read.bytes;
  if (source.way && !copies.empty())
    loaded.way = direct ? checkpoint::ReadWay::kDirect : checkpoint::ReadWay::kBuffered;
  InitReport::Phase phase(engine.init_report(), source.phase, loaded.read);
  checkpoint::RangeSource from(files.ways(), plan.reads, source.io, ring.buffer_bytes(),
                               {.direct = direct, .block = block, .verify = source.verify});
  BatchSink to(engine, plan, values, phase);
  copy(from, to, ring, {.taking = ring.size() / 4, .sync_points = sync_points});
  engine.device().compute_stream().synchronize();  // what settle() has queued
  return loaded;
}

std::vector<GatherPoint> plan_gather_points(const Weights& weights, const format::WeightMap& map,
                                            std::span<const int> params, Bytes enough) {
  std::vector<GatherPoint> points;
  Bytes since = enough;
  for (const auto& [place, unit] : whole_units_by_end(weights, map, params)) {
    if (since >= enough) {
      points.emplace_back();
      since = Bytes();
    }
    points.back().place = place;
    points.back().units.push_back(unit);
    since += resident_bytes(weights.units()[static_cast<std::size_t>(unit)]);
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
      Bytes whole;
      for (const Unit& unit : engine.weights().units()) whole += resident_bytes(unit);
      if (!enough) enough = std::max(1_B, whole / kSyncPoints);
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
        ring.queue(turn, &engine.device().compute_stream(), [&] {
          kernels::replay(each.recipe, at, count, values, each.dtype, &threads);
          weights.enqueue_store_everywhere(each.param, at, count, values, each.dtype);
        });
      }
    }
    engine.device().compute_stream().synchronize();
  });
}

}  // namespace strata::engine

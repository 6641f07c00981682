#include "strata/engine/checkpoint/weight_loader.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "strata/base/error.h"
#include "strata/io/read_probe.h"

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
  WeightSink(Weights& weights, std::span<const int> params) : weights_(weights), params_(params) {}

  std::vector<format::ParamRange> wanted() const override {
    std::vector<format::ParamRange> ranges;
    for (std::size_t i = 0; i < params_.size(); ++i) {
      if (params_[i] < 0 || params_[i] >= weights_.param_count()) {
        throw UsageError(fmt::format("the model has no parameter {}; it has {}", params_[i],
                                     weights_.param_count()));
      }
      const auto [begin, end] = weights_.owned_range(params_[i]);
      if (begin < end) ranges.push_back({i, begin, end});
    }
    return ranges;
  }
  void enqueue_store(std::size_t param, Numel begin, Numel numel, const std::byte* source,
                     DType source_dtype) override {
    weights_.enqueue_store(params_[param], begin, numel, source, source_dtype, &owed_);
  }
  void settle() override { weights_.make_masters(owed_); }

 private:
  Weights& weights_;
  std::span<const int> params_;
  OwedMasters owed_;
};

// The files that some copies come from, for both ways of reading them.
class Sources {
 public:
  Sources(const LoadSource& source, std::span<const format::RangeCopy> copies)
      : direct_(source.files.size()), ways_(direct_.size()) {
    const bool buffered = source.way.value_or(io::ReadWay::kBuffered) == io::ReadWay::kBuffered;
    for (const format::RangeCopy& copy : copies) {
      ranges_.push_back({copy.file, copy.offset, bytes_of_copy(copy)});
      io::ReadableFile& ways = ways_[copy.file];
      if (ways.buffered != nullptr) continue;
      ways.buffered = ways.direct = source.files[copy.file];
      if (buffered) continue;
      ways.direct = &direct_[copy.file].emplace(ways.buffered->direct());
    }
  }

  io::ReadChoice choose(io::ReadWay way, io::IoEngine& io, StagingRing& ring) const {
    // Into smaller buffers nothing could be read that begins within a block.
    const bool fits = ring.buffer_bytes() >= io::File::kDirectBlock * 2 &&
                      ring.buffer_bytes() % io::File::kDirectBlock == Bytes();
    if (!fits) return io::choose_read(way, {});
    std::vector<std::span<std::byte>> buffers;
    for (std::size_t turn = 0; turn < ring.size(); ++turn) buffers.push_back(ring.buffer(turn));
    return io::ReadProbe(ways_, ranges_).choose(way, io, buffers);
  }

  // Goes on to the end of a block, or of the file.
  std::span<std::byte> target_of(const ReadBatch& batch, Bytes block,
                                 std::span<std::byte> buffer) const {
    if (block == 1_B) return buffer.first(batch.bytes.size());
    const Bytes whole = std::min({align_up(batch.bytes, block), Bytes(buffer.size()),
                                  ways_[batch.file].buffered->size() - batch.offset});
    return buffer.first(std::max(batch.bytes, whole).size());
  }
  std::unique_ptr<io::Transfer> read(const ReadBatch& batch, bool direct, io::IoEngine& io,
                                     std::span<std::byte> target) const {
    const io::ReadableFile& file = ways_[batch.file];
    return io.read(direct ? *file.direct : *file.buffered, batch.offset, target);
  }

 private:
  std::vector<std::optional<io::File>> direct_;
  std::vector<io::ReadableFile> ways_;
  std::vector<io::FileRange> ranges_;
};

// The ring is in use for as long: of a load that fails no read goes on into it, and no copy that
// was queued reads from it, also one of a batch that was queued in part.
class RingUse {
 public:
  RingUse(StagingRing& ring, device::Stream& stream) : ring_(ring), stream_(stream) {}
  ~RingUse() {
    ring_.abandon();
    if (!complete_) wait_for_copies();
  }
  RingUse(const RingUse&) = delete;
  RingUse& operator=(const RingUse&) = delete;

  // The stream has done all.
  void complete() { complete_ = true; }

 private:
  void wait_for_copies() noexcept {
    try {
      stream_.synchronize();
    } catch (const std::exception&) {
      return;  // the device has failed, and copies nothing
    }
  }

  StagingRing& ring_;
  device::Stream& stream_;
  bool complete_ = false;
};

// The batches of some copies, a turn each, which are read as far ahead as the ring has buffers.
class BatchReads {
 public:
  BatchReads(const LoadSource& source, const Sources& sources, StagingRing& ring, bool direct,
             std::span<const format::RangeCopy> copies)
      : source_(source),
        sources_(sources),
        ring_(ring),
        direct_(direct),
        block_(std::max(direct ? io::File::kDirectBlock : 1_B,
                        source.check != nullptr ? source.check->block : 1_B)),
        plan_(plan_reads(copies, ring.buffer_bytes(), block_)) {
    for (std::size_t turn = 0; turn < ring.size(); ++turn) start(turn);
  }

  const std::vector<ReadBatch>& batches() const { return plan_.batches; }
  std::span<const format::RangeCopy> pieces(const ReadBatch& batch) const {
    return std::span(plan_.pieces).subspan(batch.first_piece, batch.piece_count);
  }
  Bytes total() const {
    Bytes total;
    for (const ReadBatch& batch : plan_.batches) total += batch.bytes;
    return total;
  }
  // Waits for a batch. Its bytes stay until what used_until() was told, and some turns longer.
  const std::byte* bytes(std::size_t turn) {
    const ReadBatch& batch = plan_.batches[turn];
    const std::span<std::byte> buffer = ring_.buffer(turn);
    if (source_.check != nullptr)
      source_.check->look(batch.file, batch.offset, sources_.target_of(batch, block_, buffer));
    return buffer.data();
  }
  // A buffer is read into again some turns after its bytes were queued, when the device has taken
  // them.
  void used_until(std::size_t turn, std::unique_ptr<device::Event> event) {
    ring_.used_until(turn, std::move(event));
    const std::size_t lag = ring_.size() / 4;
    if (turn >= lag) start(turn - lag + ring_.size());
  }

 private:
  void start(std::size_t turn) {
    if (turn >= plan_.batches.size()) return;
    const ReadBatch& batch = plan_.batches[turn];
    const std::span<std::byte> target = sources_.target_of(batch, block_, ring_.buffer(turn));
    ring_.started(turn, sources_.read(batch, direct_, source_.io, target));
  }

  const LoadSource& source_;
  const Sources& sources_;
  StagingRing& ring_;
  bool direct_;
  Bytes block_;  // what a read begins at, and ends at
  ReadPlan plan_;
};

// Calls a load's halts as stores come to their places.
class Halting {
 public:
  Halting(const Halts& halts, ValueSink& sink) : halts_(halts), sink_(sink) {}

  void begin() {
    if (!std::exchange(begun_, true) && halts_.begun) halts_.begun();
  }
  // Stores are queued of all before `next`.
  void before(const format::FilePlace& next) {
    for (; reached_ < halts_.places.size() && halts_.places[reached_] <= next; ++reached_) {
      begin();
      sink_.settle();  // while ranks meet
      halts_.reached(reached_);
    }
  }

 private:
  const Halts& halts_;
  ValueSink& sink_;
  bool begun_ = false;
  std::size_t reached_ = 0;
};

// `reads`: there is something to read, so that the choice is told.
io::ReadChoice choose_way(InitReport& report, const LoadSource& source, const Sources& sources,
                          StagingRing& ring, bool reads) {
  if (!source.way) return {};
  const InitReport::Phase phase(report, "probe", {});
  const io::ReadChoice choice = sources.choose(*source.way, source.io, ring);
  if (reads) report.set_reading(choice);
  return choice;
}

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

LoadedBytes load_weights(Engine& engine, const LoadSource& source, const Halts& halts) {
  WeightSink sink(engine.weights(), source.params);
  return load_values(engine, source, sink, halts);
}

LoadedBytes load_values(Engine& engine, const LoadSource& source, ValueSink& sink,
                        const Halts& halts) {
  const std::vector<format::RangeCopy> copies = source.map.intersect(sink.wanted());
  const Sources sources(source, copies);
  device::Stream& stream = engine.device().compute_stream();
  std::optional<StagingRing> own;
  std::optional<StagingRing>& kept = source.kept_ring != nullptr ? *source.kept_ring : own;
  StagingRing& ring = kept ? *kept : kept.emplace(source.staging, engine.device());
  RingUse use(ring, stream);
  const bool direct =
      choose_way(engine.init_report(), source, sources, ring, !copies.empty()).direct;
  BatchReads reads(source, sources, ring, direct, copies);
  Halting halting(halts, sink);
  LoadedBytes loaded;
  if (source.way && !copies.empty())
    loaded.way = direct ? io::ReadWay::kDirect : io::ReadWay::kBuffered;
  InitReport::Phase phase(engine.init_report(), source.phase, reads.total());
  for (std::size_t turn = 0; turn < reads.batches().size(); ++turn) {
    const ReadBatch& batch = reads.batches()[turn];
    halting.before({batch.file, batch.offset});
    const std::byte* const bytes = reads.bytes(turn);
    for (const format::RangeCopy& piece : reads.pieces(batch)) {
      sink.enqueue_store(piece.param, piece.param_begin, piece.numel,
                         bytes + (piece.offset - batch.offset).size(), piece.source_dtype);
    }
    reads.used_until(turn, stream.record());
    halting.begin();
    loaded.read += batch.bytes;
    phase.moved(batch.bytes);
  }
  halting.begin();
  halting.before({source.files.size(), Bytes()});
  sink.settle();
  stream.synchronize();
  use.complete();
  return loaded;
}

}  // namespace strata::engine

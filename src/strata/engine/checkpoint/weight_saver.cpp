#include "strata/engine/checkpoint/weight_saver.h"

#include <algorithm>
#include <tuple>

#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

constexpr std::string_view kSaving = "saving the weights";

}  // namespace

WeightSaver::WeightSaver(Engine& engine, std::string folder, std::vector<SavedTensor> tensors,
                         io::IoEngine& io, const WeightSaverOptions& options)
    : engine_(engine),
      tensors_(std::move(tensors)),
      io_(io),
      writes_(engine.collectives().rank() == 0),
      shard_gather_(engine.weights().shards(), engine.collectives(), engine.device(),
                    engine.recorder()) {
  engine_.finish_step();  // what it has left to say is better said before a checkpoint
  agree_after(engine_.collectives(), kSaving, [&] {
    engine_.require_intact_weights();
    engine_.state_offload().require_weights("saving weights");
    for (const SavedTensor& tensor : tensors_) check_tensor(tensor);
    plan_runs();
    Bytes largest;
    for (const Run& run : runs_) {
      const Unit& unit = engine_.weights().units()[static_cast<std::size_t>(run.unit)];
      if (!unit.whole) largest = std::max(largest, unit.layout.flat_bytes());
    }
    if (gathers() && largest.value > 0) {
      gathered_ = engine_.device().allocate(largest, memory::Kind::kGathered);
    }
    if (!writes_) return;
    std::vector<format::TensorSpec> specs;
    for (const SavedTensor& tensor : tensors_) specs.push_back(tensor.spec);
    format::ShardedWriterOptions files;
    files.shard_max = options.shard_max;
    writer_.emplace(std::move(folder), std::move(specs), io_, files);
    ring_.emplace(options.staging, engine_.device());
  });
}

WeightSaver::~WeightSaver() = default;

void WeightSaver::check_tensor(const SavedTensor& tensor) const {
  if (tensor.pieces.empty()) return;
  Numel sum;
  for (const SavedRange& piece : tensor.pieces) {
    STRATA_ASSERT(piece.param >= 0 && piece.param < engine_.weights().param_count());
    const plan::ParamSpec& param = engine_.weights().param(piece.param);
    if (param.dtype != tensor.spec.dtype || piece.begin.value < 0 || piece.numel.value < 0 ||
        piece.begin + piece.numel > param.numel()) {
      throw UsageError(fmt::format(
          "tensor '{}' of {} cannot take elements [{}, {}) of parameter '{}' of {} {} elements",
          tensor.spec.name, name_of(tensor.spec.dtype), piece.begin.value,
          (piece.begin + piece.numel).value, param.name, param.numel().value,
          name_of(param.dtype)));
    }
    sum += piece.numel;
  }
  const std::optional<Numel> wanted = format::checked_numel(tensor.spec.shape);
  if (!wanted || *wanted != sum) {
    throw UsageError(
        fmt::format("the pieces of tensor '{}' must fill it: its shape has {} elements, they have "
                    "{}",
                    tensor.spec.name, wanted ? wanted->value : -1, sum.value));
  }
}

void WeightSaver::plan_runs() {
  Weights& weights = engine_.weights();
  for (std::size_t t = 0; t < tensors_.size(); ++t) {
    Numel at;
    for (const SavedRange& piece : tensors_[t].pieces) {
      const Numel begin = weights.slot_of(piece.param).offset + piece.begin;
      if (piece.numel.value > 0) {
        runs_.push_back({weights.unit_of(piece.param).id, begin, piece.numel, t, at});
      }
      at += piece.numel;
    }
  }
  std::sort(runs_.begin(), runs_.end(), [](const Run& a, const Run& b) {
    return std::tie(a.unit, a.flat_begin, a.tensor) < std::tie(b.unit, b.flat_begin, b.tensor);
  });
}

std::span<const std::byte> WeightSaver::gather(const Unit& unit) {
  if (unit.whole) return unit.resident;
  const auto flat = gathered_->bytes().first(unit.layout.flat_bytes().size());
  shard_gather_.start(unit, flat)->wait();
  return flat;
}

void WeightSaver::write_pieces() {
  if (!gathers()) return;
  int unit = -1;
  std::span<const std::byte> flat;
  for (const Run& run : runs_) {
    const Unit& source = engine_.weights().units()[static_cast<std::size_t>(run.unit)];
    // After a failure peers still take part in gathers that need them.
    if (failure_ && engine_.collectives().traits().one_sided) return;
    if (run.unit != unit) {
      flat = gather(source);
      unit = run.unit;
    }
    if (!writes_ || failure_) continue;
    try {
      write_run(run, flat, source.layout.dtype());
    } catch (...) {
      failure_ = std::current_exception();
    }
  }
}

void WeightSaver::write_run(const Run& run, std::span<const std::byte> flat, DType dtype) {
  copy_out(run.tensor, bytes_of(run.tensor_begin, dtype),
           flat.subspan(bytes_of(run.flat_begin, dtype).size(), bytes_of(run.numel, dtype).size()));
}

void WeightSaver::copy_out(std::size_t tensor, Bytes offset, std::span<const std::byte> source) {
  for (std::size_t done = 0; done < source.size();) {
    const std::size_t count = std::min(source.size() - done, ring_->buffer_bytes().size());
    const std::size_t turn = ring_->next();
    const auto buffer = ring_->buffer(turn).first(count);
    engine_.device().copy(buffer, source.subspan(done, count), engine_.device().compute_stream());
    engine_.device().compute_stream().synchronize();
    ring_->started(turn, writer_->write(tensor, offset + Bytes(done), buffer));
    done += count;
  }
}

void WeightSaver::write(std::size_t tensor, std::span<const std::byte> bytes) {
  if (!writes_ || failure_) return;
  try {
    STRATA_ASSERT(tensor < tensors_.size() && tensors_[tensor].pieces.empty());
    copy_out(tensor, Bytes(), bytes);
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void WeightSaver::finish() {
  agree_after(engine_.collectives(), kSaving, [&] {
    if (failure_) std::rethrow_exception(failure_);
    if (!writes_) return;
    ring_->drain();
    writer_->finish();
  });
}

}  // namespace strata::engine

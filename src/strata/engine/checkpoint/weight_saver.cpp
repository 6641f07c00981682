#include "strata/engine/checkpoint/weight_saver.h"

#include <algorithm>
#include <tuple>

#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"
#include "strata/plan/param_spec.h"

namespace strata::engine {
namespace {

constexpr std::string_view kSaving = "saving the weights";

// Bytes of one tensor at a time, copied on the compute stream.
class TensorSource final : public checkpoint::Source {
 public:
  TensorSource(device::Device& device, Bytes buffer) : device_(device), buffer_(buffer) {}
  void give(std::size_t tensor, Bytes offset, std::span<const std::byte> bytes) {
    tensor_ = tensor;
    offset_ = offset;
    bytes_ = bytes;
  }
  bool next(checkpoint::Piece& piece) override {
    piece.file = tensor_;
    piece.offset = offset_;
    piece.bytes = std::min(buffer_, Bytes(bytes_.size()));
    return !bytes_.empty();
  }
  device::Stream* stream() override { return &device_.compute_stream(); }
  std::unique_ptr<io::Transfer> fill(checkpoint::Piece& piece, std::span<std::byte>) override {
    device_.copy(piece.content, bytes_.first(piece.content.size()), device_.compute_stream());
    bytes_ = bytes_.subspan(piece.content.size());
    offset_ += piece.bytes;
    return nullptr;
  }

 private:
  device::Device& device_;
  Bytes buffer_;
  std::size_t tensor_ = 0;
  Bytes offset_;
  std::span<const std::byte> bytes_;
};

std::vector<format::TensorSpec> specs_of(std::span<const SavedTensor> tensors) {
  std::vector<format::TensorSpec> specs;
  for (const SavedTensor& tensor : tensors) specs.push_back(tensor.spec);
  return specs;
}

}  // namespace

// The way of rank 0's bytes. The ring's transfers end before the writer does.
struct WeightSaver::Output {
  Output(device::Device& device, std::string folder, std::span<const SavedTensor> tensors,
         io::IoEngine& io, const WeightSaverOptions& options)
      : writer(std::move(folder), specs_of(tensors), io, {.shard_max = options.shard_max}),
        ring(options.staging, device),
        source(device, ring.buffer_bytes()),
        sink([this](const checkpoint::Piece& piece) {
          return writer.write(piece.file, piece.offset, piece.content);
        }),
        pipeline(source, sink, ring, {.taking = ring.size() / 2}) {}

  // Begins to write bytes of a tensor.
  void write(std::size_t tensor, Bytes offset, std::span<const std::byte> bytes) {
    source.give(tensor, offset, bytes);
    pipeline.pump();
  }

  format::ShardedWriter writer;
  checkpoint::TransferRing ring;
  TensorSource source;
  checkpoint::Taker sink;
  checkpoint::Pipeline pipeline;
};

WeightSaver::WeightSaver(Engine& engine, std::string folder, std::vector<SavedTensor> tensors,
                         io::IoEngine& io, const WeightSaverOptions& options)
    : engine_(engine),
      tensors_(std::move(tensors)),
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
    if (gathers() && largest.value > 0)
      gathered_ = engine_.device().allocate(largest, memory::Kind::kGathered);
    if (!writes_) return;
    output_ = std::make_unique<Output>(engine_.device(), std::move(folder), tensors_, io, options);
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
      throw UsageError(
          "tensor '{}' of {} cannot take elements [{}, {}) of parameter '{}' of {} {} elements",
          tensor.spec.name, name_of(tensor.spec.dtype), piece.begin.value,
          (piece.begin + piece.numel).value, param.name, param.numel().value, name_of(param.dtype));
    }
    sum += piece.numel;
  }
  const std::optional<Numel> wanted = format::checked_numel(tensor.spec.shape);
  if (!wanted || *wanted != sum)
    throw UsageError(
        "the pieces of tensor '{}' must fill it: its shape has {} elements, they have {}",
        tensor.spec.name, wanted ? wanted->value : -1, sum.value);
}

void WeightSaver::plan_runs() {
  Weights& weights = engine_.weights();
  for (std::size_t t = 0; t < tensors_.size(); ++t) {
    Numel at;
    for (const SavedRange& piece : tensors_[t].pieces) {
      const Numel begin = weights.slot_of(piece.param).offset + piece.begin;
      if (piece.numel.value > 0)
        runs_.push_back({weights.unit_of(piece.param).id, piece.param, begin, piece.numel, t, at});
      at += piece.numel;
    }
  }
  std::ranges::sort(runs_, {},
                    [](const Run& r) { return std::tuple(r.unit, r.flat_begin, r.tensor); });
}

std::span<const std::byte> WeightSaver::gather(const Unit& unit) {
  if (unit.whole) return unit.resident;
  const auto flat = gathered_->bytes().first(unit.layout.flat_bytes().size());
  shard_gather_.start(unit, flat)->wait();
  return flat;
}

void WeightSaver::attempt(const std::function<void()>& step) {
  if (!writes_ || failure_) return;
  try {
    step();
  } catch (...) {
    failure_ = std::current_exception();
  }
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
      attempt([&] { output_->pipeline.take_all(); });  // the next gather writes the same memory
      flat = gather(source);
      unit = run.unit;
    }
    attempt([&] { write_run(run, flat, source.layout.dtype()); });
  }
  attempt([&] { output_->pipeline.take_all(); });
}

void WeightSaver::write_run(const Run& run, std::span<const std::byte> flat, DType dtype) {
  const plan::ParamSpec& param = engine_.weights().param(run.param);
  std::span<const std::byte> elements =
      flat.subspan(bytes_of(run.flat_begin, dtype).size(), bytes_of(run.numel, dtype).size());
  std::vector<std::byte> whole;
  if (param.reordered()) {
    const Numel offset = engine_.weights().slot_of(run.param).offset;
    whole.resize(bytes_of(param.numel(), dtype).size());
    engine_.device().copy(whole, flat.subspan(bytes_of(offset, dtype).size(), whole.size()),
                          engine_.device().compute_stream());
    engine_.device().compute_stream().synchronize();
    plan::reorder(whole, param.shape, size_of(dtype), /*channels_last=*/false);
    elements =
        std::span(whole).subspan(bytes_of(run.flat_begin - offset, dtype).size(), elements.size());
  }
  output_->write(run.tensor, bytes_of(run.tensor_begin, dtype), elements);
  if (param.reordered()) output_->pipeline.take_all();  // `whole` is copied by then
}

void WeightSaver::write(std::size_t tensor, std::span<const std::byte> bytes) {
  attempt([&] {
    STRATA_ASSERT(tensor < tensors_.size() && tensors_[tensor].pieces.empty());
    output_->write(tensor, Bytes(), bytes);
    output_->pipeline.take_all();
  });
}

void WeightSaver::finish() {
  agree_after(engine_.collectives(), kSaving, [&] {
    if (failure_) std::rethrow_exception(failure_);
    if (!writes_) return;
    output_->pipeline.drain();
    output_->writer.finish();
  });
}

}  // namespace strata::engine

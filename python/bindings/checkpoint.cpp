// Checkpoints of safetensors: their tensors, the map from their ranges to parameters, loading into
// an engine and saving from it.
#include <ATen/ops/empty.h>

#include "bindings.h"
#include "strata/engine/checkpoint/weight_loader.h"
#include "strata/engine/checkpoint/weight_saver.h"
#include "strata/engine/unit/agreement.h"
#include "strata/format/checkpoint_index.h"
#include "strata/format/sharded_writer.h"
#include "strata/io/thread_engine.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/base/tensors.h"
#include "strata/torch/start/lending.h"

namespace strata::python {
namespace {

// (tensor, its whole shape, first element of the parameter, first of the tensor, how many or None)
using PieceTuple = std::tuple<std::string, std::vector<std::int64_t>, std::int64_t, std::int64_t,
                              std::optional<std::int64_t>>;
// (name, shape, dtype, pieces)
using SourcesTuple =
    std::tuple<std::string, std::vector<std::int64_t>, at::ScalarType, std::vector<PieceTuple>>;
// (name, shape, dtype, [(parameter, first element, how many)])
using SavedTuple = std::tuple<std::string, std::vector<std::int64_t>, at::ScalarType,
                              std::vector<std::tuple<int, std::int64_t, std::int64_t>>>;

// (name, shape, dtype)
using SpecTuple = std::tuple<std::string, std::vector<std::int64_t>, at::ScalarType>;

class Checkpoint {
 public:
  explicit Checkpoint(const std::string& path) : index_(path) {}

  const format::CheckpointIndex& index() const { return index_; }

  std::vector<SpecTuple> tensors() const {
    std::vector<SpecTuple> list;
    for (const format::CheckpointTensor& tensor : index_.tensors())
      list.emplace_back(tensor.info.name, tensor.info.shape,
                        torch::to_scalar_type(tensor.info.dtype));
    return list;
  }

  bool same(const std::string& one, const std::string& other) const {
    return format::same_tensor(index_, one, other);
  }

  at::Tensor read(const std::string& name) {
    const format::CheckpointTensor* tensor = index_.find(name);
    if (tensor == nullptr) throw FormatError("{}: there is no tensor '{}'", index_.path(), name);
    at::Tensor result = at::empty(
        tensor->info.shape, at::TensorOptions().dtype(torch::to_scalar_type(tensor->info.dtype)));
    const std::span<std::byte> target = torch::mutable_bytes(result);
    if (!target.empty())
      io_.read(index_.files()[tensor->file].file(), tensor->info.offset, target)->wait();
    return result;
  }

 private:
  format::CheckpointIndex index_;
  io::ThreadEngine io_;
};

std::unique_ptr<format::WeightMap> make_map(const std::vector<SourcesTuple>& sources,
                                            const Checkpoint& checkpoint) {
  std::vector<format::ParamSources> params;
  for (const auto& [name, shape, dtype, pieces] : sources) {
    format::ParamSources param{name, shape, torch::from_scalar_type(dtype), {}};
    for (const auto& [tensor, tensor_shape, destination, begin, numel] : pieces)
      param.pieces.push_back({tensor, tensor_shape, Numel(destination), Numel(begin),
                              numel ? std::optional(Numel(*numel)) : std::nullopt});
    params.push_back(std::move(param));
  }
  return std::make_unique<format::WeightMap>(params, checkpoint.index().tensors(),
                                             checkpoint.index().path());
}

void store(ShardedModel& model, int param, const at::Tensor& values) {
  const at::Tensor dense =
      torch::in_memory_order(values.reshape(model.specs()[static_cast<std::size_t>(param)].shape),
                             model.channels_last(param))
          .contiguous();
  if (dense.device() == model.place())
    torch::ValueIntake(model.engine(), model.place()).store(param, Numel(), dense);
  else
    model.engine().weights().store(param, Numel(), Numel(dense.numel()),
                                   torch::const_bytes(dense).data(),
                                   torch::from_scalar_type(dense.scalar_type()));
}

// Loads one model, or several of one device one after the other. Pins its buffers once, and chooses
// the way to read once.
class Reader {
 public:
  explicit Reader(ShardedModel& model)
      : io_(torch::reading_options(model.threads())), way_(model.config().strata.init_read) {}

  void load(ShardedModel& model, Checkpoint& checkpoint, const format::WeightMap& map,
            const std::vector<int>& params) {
    engine::LoadSource source{checkpoint.index().open_files(), map, params, io_};
    source.kept_ring = &ring_;
    source.way = way_;
    const engine::LoadedBytes loaded = engine::load_weights_together(model.engine(), source);
    if (loaded.way != checkpoint::ReadWay::kAuto) way_ = loaded.way;
  }

 private:
  io::ThreadEngine io_;
  std::optional<checkpoint::TransferRing> ring_;
  checkpoint::ReadWay way_;
};

class Saver {
 public:
  Saver(std::shared_ptr<ShardedModel> model, std::string folder,
        const std::vector<SavedTuple>& tensors, std::int64_t shard_max)
      : model_(std::move(model)) {
    std::vector<engine::SavedTensor> saved;
    for (const auto& [name, shape, dtype, pieces] : tensors) {
      engine::SavedTensor tensor{{name, torch::from_scalar_type(dtype), shape}, {}};
      for (const auto& [param, begin, numel] : pieces)
        tensor.pieces.push_back({param, Numel(begin), Numel(numel)});
      saved.push_back(std::move(tensor));
    }
    engine::WeightSaverOptions options;
    options.shard_max = Bytes(shard_max);
    const py::gil_scoped_release release;
    saver_ = std::make_unique<engine::WeightSaver>(model_->engine(), std::move(folder),
                                                   std::move(saved), io_, options);
  }

  void write_pieces() { saver_->write_pieces(); }
  void write(std::size_t tensor, const at::Tensor& values) {
    const at::Tensor dense = values.contiguous();
    saver_->write(tensor, torch::const_bytes(dense));
  }
  void finish() { saver_->finish(); }

 private:
  std::shared_ptr<ShardedModel> model_;
  io::ThreadEngine io_;
  std::unique_ptr<engine::WeightSaver> saver_;
};

// A Hugging Face folder of safetensors.
class WeightsWriter {
 public:
  WeightsWriter(const std::string& folder, const std::vector<SpecTuple>& tensors,
                std::int64_t shard_max)
      : writer_(folder, specs_from(tensors), io_, {Bytes(shard_max), {{"format", "pt"}}}) {}

  void write(std::size_t tensor, const at::Tensor& values) {
    const at::Tensor dense = values.contiguous();
    writer_.write(tensor, Bytes(), torch::const_bytes(dense))->wait();
  }
  void finish() { writer_.finish(); }

 private:
  static std::vector<format::TensorSpec> specs_from(const std::vector<SpecTuple>& tensors) {
    std::vector<format::TensorSpec> specs;
    for (const auto& [name, shape, dtype] : tensors)
      specs.push_back({name, torch::from_scalar_type(dtype), shape});
    return specs;
  }

  io::ThreadEngine io_;
  format::ShardedWriter writer_;
};

}  // namespace

void bind_checkpoint(py::module_& module) {
  py::class_<Checkpoint>(module, "Checkpoint")
      .def(py::init<const std::string&>(), unlocked)
      // [(name, shape, dtype)]
      .def("tensors", &Checkpoint::tensors)
      .def("read", &Checkpoint::read, unlocked)
      .def("same", &Checkpoint::same, unlocked);
  py::class_<format::WeightMap>(module, "WeightMap")
      .def(py::init(&make_map))
      .def_property_readonly("unused", &format::WeightMap::unused);
  py::class_<Reader>(module, "WeightReader")
      .def(py::init<ShardedModel&>(), py::keep_alive<1, 2>(), unlocked)
      // Collective.
      .def("load", &Reader::load, unlocked);
  module.def("store", &store, unlocked);
  module.def(
      "weights_changed", [](ShardedModel& model) { model.engine().weights_changed(); }, unlocked);
  module.def(
      "agree_on_outcome",
      [](comm::Collectives& collectives, const std::string& what, std::string kind,
         std::string message) {
        engine::agree_on_outcome(collectives, what, {std::move(kind), std::move(message)});
      },
      unlocked);
  py::class_<Saver>(module, "WeightSaver")
      .def(py::init<std::shared_ptr<ShardedModel>, std::string, const std::vector<SavedTuple>&,
                    std::int64_t>())
      .def("write_pieces", &Saver::write_pieces, unlocked)
      .def("write", &Saver::write, unlocked)
      .def("finish", &Saver::finish, unlocked);
  py::class_<WeightsWriter>(module, "WeightsWriter")
      .def(py::init<const std::string&, const std::vector<SpecTuple>&, std::int64_t>(), unlocked)
      .def("write", &WeightsWriter::write, unlocked)
      .def("finish", &WeightsWriter::finish, unlocked);
  module.def("remove_other_weights", &format::remove_other_weights, unlocked);
}

}  // namespace strata::python

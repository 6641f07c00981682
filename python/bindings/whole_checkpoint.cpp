// Checkpoints written from whole tensors, one after the other: of training, as importers have them,
// and of weights alone.
#include "strata/format/whole_checkpoint.h"

#include "bindings.h"
#include "strata/format/other_weights.h"
#include "strata/format/sharded_writer.h"
#include "strata/io/thread_engine.h"
#include "strata/torch/base/dtype.h"

namespace strata::python {
namespace {

// (role, name, shape, dtype in the model, trainable, aliases, [(kind, dtype in the file)])
using WholeTuple =
    std::tuple<std::string, std::string, std::vector<std::int64_t>, at::ScalarType, bool,
               std::vector<std::string>, std::vector<std::pair<std::string, at::ScalarType>>>;

std::vector<format::WholeTensor> tensors_from(const std::vector<WholeTuple>& tuples) {
  std::vector<format::WholeTensor> tensors;
  for (const auto& [role, name, shape, dtype, trainable, aliases, kinds] : tuples) {
    format::WholeTensor& tensor = tensors.emplace_back(format::WholeTensor{
        {name, role_from(role), shape, torch::from_scalar_type(dtype), trainable, aliases}, {}});
    for (const auto& [kind, stored] : kinds)
      tensor.kinds.emplace_back(kind, torch::from_scalar_type(stored));
  }
  return tensors;
}

class Writer {
 public:
  Writer(const std::string& folder, const std::string& tag, const std::vector<WholeTuple>& tensors)
      : tensors_(tensors_from(tensors)), writer_(folder, tag, tensors_, io_, calls_) {}

  // [(tensor, kind)], by their places in what was declared.
  std::vector<std::pair<std::size_t, std::size_t>> order() const {
    std::vector<std::pair<std::size_t, std::size_t>> list;
    for (const format::WholePiece& piece : writer_.order())
      list.emplace_back(piece.tensor, piece.kind);
    return list;
  }

  void write(const at::Tensor& values) {
    const at::Tensor dense = values.contiguous();
    if (next_ < writer_.order().size()) require_dtype(writer_.order()[next_], dense);
    writer_.write({static_cast<const std::byte*>(dense.const_data_ptr()),
                   static_cast<std::size_t>(dense.nbytes())});
    ++next_;
  }

  void publish(const std::string& training, int world_size, int stage,
               const std::vector<std::pair<std::string, std::string>>& texts) {
    for (const auto& [name, text] : texts) writer_.write_text(name, text);
    writer_.publish({training, world_size, stage, {}});
  }

 private:
  void require_dtype(const format::WholePiece& piece, const at::Tensor& values) const {
    const format::WholeTensor& tensor = tensors_[piece.tensor];
    const DType wanted = tensor.kinds[piece.kind].second;
    const DType found = torch::from_scalar_type(values.scalar_type());
    if (wanted == found) return;
    throw UsageError(
        fmt::format("a tensor has another dtype than was declared: tensor='{}' wanted={} found={}",
                    tensor.tensor.name, name_of(wanted), name_of(found)));
  }

  io::ThreadEngine io_;
  io::KernelFolderCalls calls_;
  std::vector<format::WholeTensor> tensors_;
  format::WholeCheckpointWriter writer_;
  std::size_t next_ = 0;
};

// (name, shape, dtype)
using SpecTuple = std::tuple<std::string, std::vector<std::int64_t>, at::ScalarType>;

// A Hugging Face folder of safetensors.
class WeightsWriter {
 public:
  WeightsWriter(const std::string& folder, const std::vector<SpecTuple>& tensors,
                std::int64_t shard_max)
      : writer_(folder, specs_from(tensors), io_, {Bytes(shard_max), {{"format", "pt"}}}) {}

  void write(std::size_t tensor, const at::Tensor& values) {
    const at::Tensor dense = values.contiguous();
    writer_
        .write(tensor, Bytes(),
               {static_cast<const std::byte*>(dense.const_data_ptr()),
                static_cast<std::size_t>(dense.nbytes())})
        ->wait();
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

format::TensorRole role_from(const std::string& name) {
  using format::TensorRole;
  for (const TensorRole role : {TensorRole::kParameter, TensorRole::kBuffer,
                                TensorRole::kRankBuffer, TensorRole::kClient}) {
    if (name_of(role) == name) return role;
  }
  STRATA_ASSERT(false);
}

void bind_whole_checkpoint(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Writer>(module, "WholeCheckpointWriter")
      .def(py::init<const std::string&, const std::string&, const std::vector<WholeTuple>&>(),
           py::arg("folder"), py::arg("tag"), py::arg("tensors"), unlocked)
      .def_property_readonly("order", &Writer::order)
      .def("write", &Writer::write, py::arg("values"), unlocked)
      .def("publish", &Writer::publish, py::arg("training"), py::arg("world_size"),
           py::arg("stage"), py::arg("texts"), unlocked);
  py::class_<WeightsWriter>(module, "WeightsWriter")
      .def(py::init<const std::string&, const std::vector<SpecTuple>&, std::int64_t>(),
           py::arg("folder"), py::arg("tensors"), py::arg("shard_max"), unlocked)
      .def("write", &WeightsWriter::write, py::arg("tensor"), py::arg("values"), unlocked)
      .def("finish", &WeightsWriter::finish, unlocked);
  module.def("remove_other_weights", &format::remove_other_weights, py::arg("folder"),
             py::arg("ours"), unlocked);
}

}  // namespace strata::python

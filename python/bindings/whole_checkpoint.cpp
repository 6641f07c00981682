// Checkpoints written from whole tensors, one after the other: training checkpoints for importers,
// and checkpoints of weights alone.
#include "bindings.h"
#include "strata/checkpoint/writer.h"
#include "strata/format/sharded_writer.h"
#include "strata/io/thread_engine.h"
#include "strata/torch/base/dtype.h"

namespace strata::python {
namespace {

// (role, name, shape, dtype in the model, trainable, aliases, [(kind, dtype in the file)])
using WholeTuple =
    std::tuple<std::string, std::string, std::vector<std::int64_t>, at::ScalarType, bool,
               std::vector<std::string>, std::vector<std::pair<std::string, at::ScalarType>>>;

std::vector<checkpoint::WholeTensor> tensors_from(const std::vector<WholeTuple>& tuples) {
  std::vector<checkpoint::WholeTensor> tensors;
  for (const auto& [role, name, shape, dtype, trainable, aliases, kinds] : tuples) {
    checkpoint::WholeTensor& tensor = tensors.emplace_back(checkpoint::WholeTensor{
        {name, role_from(role), shape, torch::from_scalar_type(dtype), trainable, aliases}, {}});
    for (const auto& [kind, stored] : kinds)
      tensor.kinds.emplace_back(kind, torch::from_scalar_type(stored));
  }
  return tensors;
}

// `read(tensor, kind)` returns the values of one tensor at a time; its arguments are indices into
// the declared tensors.
void write_whole(const std::string& folder, const std::string& tag,
                 const std::vector<WholeTuple>& tuples, const std::string& training, int world_size,
                 int stage, const py::function& read) {
  const checkpoint::WholeCheckpoint whole{folder, tag, tensors_from(tuples), training, world_size,
                                          stage,  {}};
  io::ThreadEngine io;
  io::KernelFolderCalls calls;
  at::Tensor dense;
  const auto read_one = [&](std::size_t tensor, std::size_t kind) -> std::span<const std::byte> {
    const py::gil_scoped_acquire acquire;
    dense = read(tensor, kind).cast<at::Tensor>().contiguous();
    const checkpoint::WholeTensor& declared = whole.tensors[tensor];
    const DType wanted = declared.kinds[kind].second;
    const DType found = torch::from_scalar_type(dense.scalar_type());
    if (wanted != found) {
      throw UsageError(fmt::format(
          "a tensor has another dtype than was declared: tensor='{}' wanted={} found={}",
          declared.tensor.name, name_of(wanted), name_of(found)));
    }
    return {static_cast<const std::byte*>(dense.const_data_ptr()),
            static_cast<std::size_t>(dense.nbytes())};
  };
  const py::gil_scoped_release release;
  checkpoint::write_whole(whole, read_one, io, calls);
}

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
  module.def("write_whole", &write_whole, py::arg("folder"), py::arg("tag"), py::arg("tensors"),
             py::arg("training"), py::arg("world_size"), py::arg("stage"), py::arg("read"));
  py::class_<WeightsWriter>(module, "WeightsWriter")
      .def(py::init<const std::string&, const std::vector<SpecTuple>&, std::int64_t>(),
           py::arg("folder"), py::arg("tensors"), py::arg("shard_max"), unlocked)
      .def("write", &WeightsWriter::write, py::arg("tensor"), py::arg("values"), unlocked)
      .def("finish", &WeightsWriter::finish, unlocked);
  module.def("remove_other_weights", &format::remove_other_weights, py::arg("folder"),
             py::arg("ours"), unlocked);
}

}  // namespace strata::python

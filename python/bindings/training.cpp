// Training checkpoints, as Python saves and loads them; also written from whole tensors, one after
// the other, for importers.
#include <ATen/ops/empty.h>

#include "bindings.h"
#include "strata/checkpoint/folder.h"
#include "strata/checkpoint/writer.h"
#include "strata/engine/checkpoint/training_loader.h"
#include "strata/engine/checkpoint/training_saver.h"
#include "strata/io/thread_engine.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/base/tensors.h"

namespace strata::python {
namespace {

using format::TensorRole;

// The role that format::name_of() calls so.
format::TensorRole role_from(const std::string& name) {
  using format::TensorRole;
  for (const TensorRole role : {TensorRole::kParameter, TensorRole::kBuffer,
                                TensorRole::kRankBuffer, TensorRole::kClient}) {
    if (name_of(role) == name) return role;
  }
  STRATA_ASSERT(false);
}

// (role, name, rank that writes it, shape, dtype, contiguous tensor on the host or, on other ranks,
// None)
using ExtraTuple = std::tuple<std::string, std::string, int, std::vector<std::int64_t>,
                              at::ScalarType, std::optional<at::Tensor>>;
// (parameter, kind, contiguous values of this rank's part, or of the whole parameter)
using StateTuple = std::tuple<int, std::string, at::Tensor>;

// (name, shape)
using BufferTuple = std::tuple<std::string, std::vector<std::int64_t>>;

std::vector<engine::BufferSpec> specs_from(const std::vector<BufferTuple>& buffers) {
  std::vector<engine::BufferSpec> specs;
  for (const auto& [name, shape] : buffers) specs.push_back({name, shape});
  return specs;
}

engine::SavedContent content_from(const std::vector<std::vector<std::string>>& aliases,
                                  const std::vector<ExtraTuple>& tensors,
                                  const std::vector<StateTuple>& states, bool frozen) {
  engine::SavedContent content;
  content.aliases = aliases;
  content.frozen = frozen;
  for (const auto& [role, name, rank, shape, dtype, tensor] : tensors) {
    std::span<const std::byte> bytes;
    if (tensor) bytes = torch::const_bytes(*tensor);
    content.tensors.push_back(
        {{name, role_from(role), shape, torch::from_scalar_type(dtype), false, {}}, bytes, rank});
  }
  for (const auto& [param, kind, tensor] : states)
    content.states.push_back({param, kind, torch::from_scalar_type(tensor.scalar_type()),
                              torch::const_bytes(tensor).data(), Numel(tensor.numel())});
  return content;
}

// Saves a model's checkpoints, synchronously or beside training, as its configuration says.
class TrainingSaver : NonCopyable {
 public:
  // `beside`: bytes of buffers that this rank will save.
  TrainingSaver(std::shared_ptr<ShardedModel> model, std::int64_t beside)
      : model_(std::move(model)),
        io_(std::make_shared<io::ThreadEngine>()),
        calls_(std::make_shared<io::FolderCalls>()) {
    if (!model_->config().async_checkpoints) return;
    async_ = std::make_unique<engine::AsyncSaver>(model_->engine(), io_, calls_);
    async_->expect(Bytes(beside));
  }
  // Python's lock is held here, and other ranks' files may take long.
  ~TrainingSaver() {
    const py::gil_scoped_release release;
    async_.reset();
  }

  // Collective.
  void save(const std::string& folder, const std::string& tag, const std::string& training,
            const std::vector<std::vector<std::string>>& aliases,
            const std::vector<ExtraTuple>& tensors, const std::vector<StateTuple>& states,
            const std::vector<std::pair<std::string, std::string>>& texts, bool frozen,
            bool latest) {
    model_->engine().finish_step();
    const engine::SaveRequest request{
        folder,
        tag,
        engine::with_progress(training, model_->engine(), model_->control()),
        content_from(aliases, tensors, states, frozen),
        texts,
        {latest, model_->config().keep_checkpoints}};
    if (async_ != nullptr)
      async_->start(request);
    else
      engine::save_training(model_->engine(), request, *io_, *calls_);
  }
  // Collective.
  void wait() {
    if (async_ != nullptr) async_->wait();
  }

 private:
  std::shared_ptr<ShardedModel> model_;
  std::shared_ptr<io::ThreadEngine> io_;
  std::shared_ptr<io::FolderCalls> calls_;
  std::unique_ptr<engine::AsyncSaver> async_;  // null: saves at once
};

class Opened {
 public:
  Opened(comm::Collectives& collectives, const std::string& path)
      : checkpoint_(engine::open_training(collectives, path)) {}
  // On this rank alone.
  explicit Opened(const std::string& path) : checkpoint_(path, format::read_manifest(path)) {}

  const engine::TrainingCheckpoint& get() const { return checkpoint_; }

  // [(role, name, shape, dtype, trainable, aliases)]
  py::list tensors() const {
    py::list list;
    for (const format::ManifestTensor& tensor : checkpoint_.manifest().tensors)
      list.append(py::make_tuple(std::string(name_of(tensor.role)), tensor.name, tensor.shape,
                                 torch::to_scalar_type(tensor.dtype), tensor.trainable,
                                 tensor.aliases));
    return list;
  }

  bool has(const std::string& name, const std::string& kind) const {
    const auto tensor = checkpoint_.find(TensorRole::kParameter, name);
    return tensor && checkpoint_.has(*tensor, kind);
  }

  // The dtype of a parameter's values of this kind, as read() returns them; None: there are none.
  std::optional<at::ScalarType> dtype_of(const std::string& name, const std::string& kind) const {
    const auto tensor = checkpoint_.find(TensorRole::kParameter, name);
    if (!tensor || !checkpoint_.has(*tensor, kind)) return std::nullopt;
    if (is_in_8_bits(*tensor, kind)) return at::kFloat;
    const auto extent = checkpoint_.extents(*tensor, kind).front();
    return torch::to_scalar_type(checkpoint_.manifest().extents[extent].dtype);
  }

  // A state in 8 bits becomes numbers.
  at::Tensor read(const std::string& role, const std::string& name, const std::string& kind) {
    const auto tensor = checkpoint_.find(role_from(role), name);
    if (!tensor) throw FormatError("{}: there is no {} '{}'", checkpoint_.path(), role, name);
    const auto& entry = checkpoint_.manifest().tensors[*tensor];
    if (is_in_8_bits(*tensor, kind)) {
      at::Tensor numbers = at::empty(entry.shape, at::kFloat);
      engine::read_decoded(checkpoint_, *tensor, io_, torch::floats_of(numbers), kind);
      return numbers;
    }
    const auto& extents = checkpoint_.extents(*tensor, kind);
    const DType dtype =
        extents.empty() ? entry.dtype : checkpoint_.manifest().extents[extents.front()].dtype;
    at::Tensor values =
        at::empty(entry.shape, at::TensorOptions().dtype(torch::to_scalar_type(dtype)));
    STRATA_ASSERT(engine::whole_bytes(checkpoint_, *tensor, kind) == Bytes(values.nbytes()));
    engine::read_whole(checkpoint_, *tensor, io_, torch::mutable_bytes(values), kind);
    return values;
  }

  // (missing, unexpected, misshapen) of parameters, and the same of buffers
  py::tuple differences(ShardedModel& model, const std::vector<BufferTuple>& buffers) const {
    const auto names = [](const engine::UnlikeNames& found) {
      return py::make_tuple(found.missing, found.unexpected, found.misshapen);
    };
    const comm::Collectives& ranks = model.engine().collectives();
    return py::make_tuple(names(engine::compare(checkpoint_, model.engine())),
                          names(engine::compare_buffers(checkpoint_, specs_from(buffers),
                                                        ranks.rank(), ranks.world_size())));
  }

  // Collective.
  void load(ShardedModel& model, bool states, bool strict, bool without_frozen,
            const std::vector<StateTuple>& targets, const std::vector<BufferTuple>& buffers) {
    engine::LoadRequest request;
    request.buffers = specs_from(buffers);
    request.states = states;
    request.strict = strict;
    request.without_frozen = without_frozen;
    for (const auto& [param, kind, tensor] : targets)
      request.targets.push_back({param, kind, torch::from_scalar_type(tensor.scalar_type()),
                                 torch::mutable_bytes(tensor).data()});
    io::ThreadEngine io(torch::reading_options(model.threads()));
    engine::load_training(model.engine(), checkpoint_, request, io);
  }

  void restore_progress(ShardedModel& model) const {
    engine::restore_progress(checkpoint_.manifest().training, model.control(), checkpoint_.path());
  }
  void restore_optimizer_steps(ShardedModel& model) const {
    engine::restore_optimizer_steps(checkpoint_.manifest().training, model.engine(),
                                    checkpoint_.path());
  }

 private:
  bool is_in_8_bits(std::size_t tensor, const std::string& kind) const {
    return checkpoint_.has(tensor, kind + std::string(format::kScales));
  }

  engine::TrainingCheckpoint checkpoint_;
  io::ThreadEngine io_;
};

template <auto Field>
auto of_manifest(const Opened& opened) {
  return opened.get().manifest().*Field;
}

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
  io::FolderCalls calls;
  at::Tensor dense;
  const auto read_one = [&](std::size_t tensor, std::size_t kind) -> std::span<const std::byte> {
    const py::gil_scoped_acquire acquire;
    dense = read(tensor, kind).cast<at::Tensor>().contiguous();
    const checkpoint::WholeTensor& declared = whole.tensors[tensor];
    const DType wanted = declared.kinds[kind].second;
    const DType found = torch::from_scalar_type(dense.scalar_type());
    if (wanted != found)
      throw UsageError(
          "a tensor has another dtype than was declared: tensor='{}' wanted={} found={}",
          declared.tensor.name, name_of(wanted), name_of(found));
    return torch::const_bytes(dense);
  };
  const py::gil_scoped_release release;
  checkpoint::write_whole(whole, read_one, io, calls);
}

}  // namespace

void bind_training(py::module_& module) {
  py::class_<TrainingSaver>(module, "TrainingSaver")
      .def(py::init<std::shared_ptr<ShardedModel>, std::int64_t>(), unlocked)
      .def("save", &TrainingSaver::save, unlocked)
      .def("wait", &TrainingSaver::wait, unlocked);
  module.def("fingerprint", [](const at::Tensor& values) {
    return format::checksum_text(format::checksum_of(torch::const_bytes(values)));
  });
  module.def("loading_failed", [](ShardedModel& model, const std::string& cause) {
    model.engine().loading_failed(cause);
  });
  module.def("latest_tag", &checkpoint::latest_tag);
  module.def("find_checkpoint", &checkpoint::find_checkpoint);
  module.def("whole_checkpoints", &checkpoint::whole_checkpoints);
  module.def("write_whole", &write_whole);
  using format::Manifest;
  py::class_<Opened>(module, "TrainingCheckpoint")
      .def(py::init<comm::Collectives&, const std::string&>(), unlocked)
      .def(py::init<const std::string&>(), unlocked)
      .def_property_readonly("path", [](const Opened& o) { return o.get().path(); })
      .def_property_readonly("training", &of_manifest<&Manifest::training>)
      .def_property_readonly("world_size", &of_manifest<&Manifest::world_size>)
      .def_property_readonly("stage", &of_manifest<&Manifest::stage>)
      .def_property_readonly("kinds", &of_manifest<&Manifest::kinds>)
      .def("tensors", &Opened::tensors)
      .def("has", &Opened::has)
      .def("dtype_of", &Opened::dtype_of)
      .def("read", &Opened::read, py::arg("role"), py::arg("name"), py::arg("kind") = "value",
           unlocked)
      .def("differences", &Opened::differences)
      .def("load", &Opened::load, unlocked)
      .def("restore_progress", &Opened::restore_progress, unlocked)
      .def("restore_optimizer_steps", &Opened::restore_optimizer_steps, unlocked);
}

}  // namespace strata::python

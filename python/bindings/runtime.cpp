// Collectives and devices for a process that Python drives.
#include <algorithm>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "bindings.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/engine/step_control.h"
#include "strata/io/folder_calls.h"
#include "strata/offload/make_store.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/ranks/rank_joining.h"

namespace strata::python {
namespace {

// A file that Python writes. It lives until the end of its `with` block, even if other references
// remain.
class HeldFile {
 public:
  explicit HeldFile(std::string path) : file_(std::in_place, std::move(path)) {}
  io::AtomicFile& held() {
    if (!file_) throw UsageError("an AtomicFile ends with its 'with': open it anew");
    return *file_;
  }
  void end() { file_.reset(); }

 private:
  std::optional<io::AtomicFile> file_;
};

// The backends of one Collectives, which owns them.
struct UsedBackends {
  std::vector<std::weak_ptr<torch::GroupBackend>> backends;
};

// {"peer" | "nccl": {"gather_s": seconds, "reduce_s": seconds}}, or None.
py::object as_dict(const std::optional<comm::ProbedTransports>& probe) {
  if (!probe) return py::none();
  const auto figures = [](const comm::ProbeTimes& times) {
    return py::dict(py::arg("gather_s") = times.gather, py::arg("reduce_s") = times.reduce);
  };
  return py::dict(py::arg("peer") = figures(probe->peer), py::arg("nccl") = figures(probe->nccl));
}

torch::ModelRuntime storing(torch::ModelRuntime runtime, const engine::Config& config) {
  const engine::EngineOptions options = engine::engine_options_from(config, DType::kFloat32);
  if (options.weights.uses(memory::Tier::kNvme)) {
    const int rank = runtime.collectives->rank();
    runtime.states = offload::make_stores({}, options.weights, *runtime.device, rank).weights;
  }
  return runtime;
}

py::tuple join_ranks(const engine::Config& config, int rank, int world_size, c10::Device device,
                     c10::intrusive_ptr<c10d::Store> store, const py::function& new_backend,
                     const py::function& say, bool on_gpu, bool nccl_runs, std::string identity,
                     std::shared_ptr<device::HostWaits> waits) {
  UsedBackends used;
  const auto make = [&](const std::string& backend, const std::vector<int>& ranks) {
    const py::gil_scoped_acquire acquire;
    auto made = std::make_shared<torch::GroupBackend>(
        new_backend(backend, ranks).cast<c10::intrusive_ptr<c10d::Backend>>());
    used.backends.push_back(made);
    return made;
  };
  const auto log = [&](bool warning, const std::string& text) {
    const py::gil_scoped_acquire acquire;
    say(warning, text);
  };
  const torch::JoiningRank joining{rank,
                                   world_size,
                                   device,
                                   on_gpu,
                                   std::move(store),
                                   torch::host_identity(),
                                   std::move(identity),
                                   nccl_runs,
                                   std::move(waits),
                                   make,
                                   log};
  comm::JoinedTransports joined = without_lock([&] { return torch::join_ranks(config, joining); });
  return py::make_tuple(std::move(joined.collectives), as_dict(joined.probe), std::move(used));
}

void bind_joining(py::module_& module) {
  // Destroys the backends of a group that is no longer used, even if references to it remain.
  module.def(
      "release_group",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) { group->release_resources(); },
      unlocked);
  py::class_<UsedBackends>(module, "UsedBackends")
      .def("in_use",
           [](const UsedBackends& used) {
             return std::ranges::any_of(used.backends, [](const auto& b) { return !b.expired(); });
           })
      .def(
          "let_go",
          [](UsedBackends& used) {
            for (const auto& backend : std::exchange(used.backends, {})) {
              if (const auto left = backend.lock()) left->let_go();
            }
          },
          unlocked);
  module.def("require_possible", [](const engine::Config& config, int world_size,
                                    c10::Device device, bool on_gpu, bool has_nccl) {
    comm::require_possible(
        config.strata.transports,
        {world_size, config.shard_group_size(world_size), on_gpu, has_nccl, device.str()});
  });
  // (Collectives, probe or None, UsedBackends). new_backend(name, ranks) makes "gloo" or "nccl"
  // among these ranks of the world; say(warning, text) logs a choice, on rank 0. `identity`: the
  // text that identifies the device.
  module.def("join_ranks", &join_ranks, py::arg("config"), py::arg("rank"), py::arg("world_size"),
             py::arg("device"), py::arg("store"), py::arg("new_backend"), py::arg("say"),
             py::arg("on_gpu"), py::arg("nccl_runs"), py::arg("identity"), py::arg("waits"));
  module.def("tell_failure", [](const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                int world_size, const std::string& reason, double patience_s) {
    const py::gil_scoped_release release;
    const std::chrono::milliseconds patience(static_cast<std::int64_t>(patience_s * 1000.0));
    torch::tell_failure(store, rank, world_size, reason, patience);
  });
}

void bind_files(py::module_& module) {
  module.def("write_file_atomically", &io::write_file_atomically, unlocked);
  // Python writes through fileno(). The end of its `with` block removes an unpublished file.
  py::class_<HeldFile>(module, "AtomicFile")
      .def(py::init<std::string>(), unlocked)
      .def("__enter__", [](HeldFile& file) -> HeldFile& { return file; })
      .def("__exit__", [](HeldFile& file, const py::args&) { file.end(); })
      .def("fileno", [](HeldFile& file) { return file.held().file().fd(); })
      .def(
          "publish", [](HeldFile& file) { file.held().publish(); }, unlocked);
}

}  // namespace

void bind_runtime(py::module_& module) {
  py::class_<comm::Collectives, std::shared_ptr<comm::Collectives>>(module, "Collectives",
                                                                    py::dynamic_attr())
      .def_property_readonly("name",
                             [](const comm::Collectives& c) { return std::string(c.name()); })
      .def_property_readonly("rank", &comm::Collectives::rank)
      .def_property_readonly("world_size", &comm::Collectives::world_size)
      // (index of this rank's slice, slices, shard group, shard groups, slices that it holds)
      .def_property_readonly("shard_position",
                             [](const comm::Collectives& c) {
                               const comm::ShardPosition place = c.shard_position();
                               return std::make_tuple(place.index, place.count, place.group,
                                                      place.groups, place.parts);
                             })
      .def("require_usable", &comm::Collectives::require_usable, unlocked)
      .def("leave", &comm::Collectives::leave, unlocked)
      .def("all_left", &comm::Collectives::all_left)
      .def("barrier", &comm::Collectives::barrier, unlocked)
      .def("all_gather_text", &comm::Collectives::all_gather_text, unlocked);

  py::class_<device::HostWaits, std::shared_ptr<device::HostWaits>>(module, "HostWaits")
      .def_property_readonly("count", &device::HostWaits::count);
  // The resources of a rank's models; several may share one, with a device's streams and kernels.
  py::class_<torch::ModelRuntime>(module, "Runtime")
      .def(py::init([](c10::Device device, std::optional<int> threads, int world_size) {
             const py::gil_scoped_release release;
             return torch::make_runtime(device, torch::host_threads(threads, world_size));
           }),
           py::arg("device"), py::arg("threads"), py::arg("world_size"))
      .def_property_readonly("device", [](const torch::ModelRuntime& r) { return r.place; })
      // The counter of host waits, for other objects that this rank makes on the device.
      .def_property_readonly("host_waits",
                             [](const torch::ModelRuntime& r) { return r.device->host_waits(); })
      // Values will come from files or the host: makes their staging memory meanwhile.
      .def("expect_values",
           [](torch::ModelRuntime& r) { checkpoint::TransferRing::expect({}, *r.device); })
      // The same with the collectives of ranks that are connected by now.
      .def("joined",
           [](torch::ModelRuntime r, std::shared_ptr<comm::Collectives> collectives) {
             r.collectives = std::move(collectives);
             return r;
           })
      // The same runtime with one store on drives for the weights of all its models, if they lie
      // there.
      .def("storing", &storing, unlocked);

  module.def("single_rank", &torch::single_rank, unlocked);
  // GPUs that torch and this build can both use. The first call starts the driver.
  module.def("usable_gpus", &torch::usable_gpus, unlocked);
  module.def("warm_up", &torch::warm_up, unlocked);
  // Chooses the device for a model whose parameters are [(name, tensor)]; an empty list: it lies
  // nowhere yet.
  module.def(
      "choose_device",
      [](const engine::Config& config,
         const std::vector<std::pair<std::string, at::Tensor>>& parameters, int local_rank) {
        return torch::choose_device(config.strata.device, torch::device_of(parameters), local_rank);
      },
      unlocked);
  bind_joining(module);
  bind_files(module);
}

}  // namespace strata::python

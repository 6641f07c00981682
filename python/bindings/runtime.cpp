// Collectives and devices for a process that Python drives.
#include "bindings.h"
#include "strata/comm/combined/collectives_probe.h"
#include "strata/comm/combined/grouped_collectives.h"
#include "strata/comm/combined/split_collectives.h"
#include "strata/comm/host/shm_collectives.h"
#include "strata/comm/peer/peer_collectives.h"
#include "strata/engine/checkpoint/staging_ring.h"
#include "strata/io/atomic_file.h"
#include "strata/torch/base/host_threads.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/ranks/c10d_collectives.h"
#include "strata/torch/ranks/device_collectives.h"
#include "strata/torch/ranks/rank_environment.h"
#include "strata/torch/ranks/store_bootstrap.h"

namespace strata::python {
namespace {

std::chrono::milliseconds to_milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000.0));
}

// What the ranks of a part of the world are called in errors: (number of the first, step).
using RankNumbers = std::pair<int, int>;
constexpr RankNumbers kAllRanks{0, 1};

// Throws the error that ended these collectives, if one did; takes part in nothing.
void require_usable(comm::Collectives& collectives) {
  try {
    static_cast<void>(collectives.allocate("require_usable", Bytes(1)));
  } catch (const CommError&) {
    throw;
  } catch (const Error&) {  // no memory, say: not what was asked
    return;
  }
}

void bind_collectives(py::module_& module) {
  module.def(
      "shm_collectives",
      [](c10::intrusive_ptr<c10d::Store> store, int rank, int world_size, double timeout_s,
         RankNumbers numbers) {
        const py::gil_scoped_release release;
        torch::StoreBootstrap bootstrap(std::move(store), rank, world_size,
                                        to_milliseconds(timeout_s));
        comm::CommOptions options;
        options.timeout = to_milliseconds(timeout_s);
        options.names = {numbers.first, numbers.second};
        return std::shared_ptr<comm::Collectives>(comm::make_shm_collectives(bootstrap, options));
      },
      py::arg("store"), py::arg("rank"), py::arg("world_size"), py::arg("timeout_s"),
      py::arg("numbers") = kAllRanks);
  module.def(
      "exchange_text",
      [](c10::intrusive_ptr<c10d::Store> store, int rank, int world_size, double timeout_s,
         const std::string& text) {
        const py::gil_scoped_release release;
        torch::StoreBootstrap bootstrap(std::move(store), rank, world_size,
                                        to_milliseconds(timeout_s));
        return bootstrap.exchange(text);
      },
      py::arg("store"), py::arg("rank"), py::arg("world_size"), py::arg("timeout_s"),
      py::arg("text"));
  module.def(
      "c10d_collectives",
      [](c10::intrusive_ptr<c10d::Backend> group, c10::intrusive_ptr<c10d::Store> store,
         std::string id, std::string name, RankNumbers numbers) {
        return std::shared_ptr<comm::Collectives>(
            torch::make_c10d_collectives(std::move(group), std::move(store), std::move(id),
                                         std::move(name), {numbers.first, numbers.second}));
      },
      py::arg("group"), py::arg("store"), py::arg("id"), py::arg("name"),
      py::arg("numbers") = kAllRanks);
}

// Made of other collectives.
void bind_combined_collectives(py::module_& module) {
  module.def(
      "peer_collectives",
      [](std::shared_ptr<comm::Collectives> control, c10::Device device, double timeout_s,
         RankNumbers numbers) {
        const py::gil_scoped_release release;
        comm::PeerOptions options;
        options.timeout = to_milliseconds(timeout_s);
        options.names = {numbers.first, numbers.second};
        return std::shared_ptr<comm::Collectives>(comm::make_peer_collectives(
            torch::make_device(device, 1), std::move(control), options));
      },
      py::arg("control"), py::arg("device"), py::arg("timeout_s"), py::arg("numbers") = kAllRanks);
  module.def(
      "device_collectives",
      [](std::shared_ptr<comm::Collectives> control, c10::intrusive_ptr<c10d::Backend> bulk,
         c10::intrusive_ptr<c10d::Store> store, c10::Device device, std::string id,
         std::string name, RankNumbers numbers) {
        const py::gil_scoped_release release;
        torch::DeviceGroup group;
        group.place = device;
        group.device = torch::make_device(device, 1);
        group.control = std::move(control);
        group.bulk = std::move(bulk);
        group.store = std::move(store);
        group.id = std::move(id);
        group.name = std::move(name);
        group.names = {numbers.first, numbers.second};
        return std::shared_ptr<comm::Collectives>(torch::make_device_collectives(std::move(group)));
      },
      py::arg("control"), py::arg("bulk"), py::arg("store"), py::arg("device"), py::arg("id"),
      py::arg("name"), py::arg("numbers") = kAllRanks);
  // Of one control plane.
  module.def(
      "split_collectives",
      [](std::shared_ptr<comm::Collectives> gathers,
         std::shared_ptr<comm::Collectives> reductions) {
        return std::shared_ptr<comm::Collectives>(
            comm::make_split_collectives(std::move(gathers), std::move(reductions)));
      },
      py::arg("gathers"), py::arg("reductions"));
  // Seconds of (a gather, a reduction) as training under this configuration has them.
  module.def(
      "probe_collectives",
      [](comm::Collectives& collectives, c10::Device device, const engine::Config& config) {
        const py::gil_scoped_release release;
        const auto computes_on = torch::make_device(device, 1);
        const comm::ProbeTimes times =
            comm::probe(collectives, *computes_on,
                        {config.precision.param_dtype, config.precision.communication_dtype});
        return std::pair(times.gather, times.reduce);
      },
      py::arg("collectives"), py::arg("device"), py::arg("config"));
  module.def(
      "grouped_collectives",
      [](std::shared_ptr<comm::Collectives> inside, std::shared_ptr<comm::Collectives> across,
         c10::Device device, bool secondary) {
        return std::shared_ptr<comm::Collectives>(comm::make_grouped_collectives(
            std::move(inside), std::move(across), torch::make_device(device, 1),
            secondary ? comm::Slices::kSecondary : comm::Slices::kReplicated));
      },
      py::arg("inside"), py::arg("across"), py::arg("device"), py::arg("secondary"));
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
      .def_property_readonly("shard_place",
                             [](const comm::Collectives& c) {
                               const comm::ShardPlace place = c.shard_place();
                               return std::make_tuple(place.index, place.count, place.group,
                                                      place.groups, place.parts);
                             })
      .def("require_usable", &require_usable)
      .def("barrier", &comm::Collectives::barrier, py::call_guard<py::gil_scoped_release>())
      .def("all_gather_text", &comm::Collectives::all_gather_text,
           py::call_guard<py::gil_scoped_release>());

  // What a rank's models run on; several may share one, and with it a device's streams and kernels.
  py::class_<torch::ModelRuntime>(module, "Runtime")
      .def(py::init([](c10::Device device, std::optional<int> threads, int world_size) {
             const py::gil_scoped_release release;
             return torch::make_runtime(device, torch::host_threads(threads, world_size));
           }),
           py::arg("device"), py::arg("threads"), py::arg("world_size"))
      .def_property_readonly("device", [](const torch::ModelRuntime& r) { return r.place; })
      // Values will come from files, or from the host: what they pass through is made meanwhile.
      .def("expect_values",
           [](torch::ModelRuntime& r) { engine::StagingRing::expect({}, *r.device); })
      // The same with the collectives of ranks that are connected by now.
      .def("joined", [](torch::ModelRuntime r, std::shared_ptr<comm::Collectives> collectives) {
        r.collectives = std::move(collectives);
        return r;
      });

  module.def("single_rank", &torch::single_rank, py::arg("device"));
  // GPUs that torch and this build can both use.
  module.def("usable_gpus", &torch::usable_gpus);
  // Whole or not at all, by a temporary file that follows no link; IoError.
  module.def("write_file_atomically", &io::write_file_atomically, py::arg("path"), py::arg("text"),
             py::call_guard<py::gil_scoped_release>());
  // Where a model whose parameters are [(name, tensor)] shall train; none: nowhere yet.
  module.def(
      "choose_device",
      [](const engine::Config& config,
         const std::vector<std::pair<std::string, at::Tensor>>& parameters, int local_rank) {
        return torch::choose_device(config.strata.device, torch::device_of(parameters), local_rank);
      },
      py::arg("config"), py::arg("parameters"), py::arg("local_rank"));
  bind_collectives(module);
  bind_combined_collectives(module);
}

}  // namespace strata::python

// Collectives and devices for a process that Python drives.
#include "bindings.h"
#include "strata/comm/local_collectives.h"
#include "strata/comm/shm_collectives.h"
#include "strata/device/cpu_device.h"
#include "strata/offload/memory_store.h"
#include "strata/torch/c10d_collectives.h"
#include "strata/torch/store_bootstrap.h"

namespace strata::python {
namespace {

std::chrono::milliseconds to_milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000.0));
}

}  // namespace

void bind_runtime(py::module_& module) {
  py::class_<comm::Collectives, std::shared_ptr<comm::Collectives>>(module, "Collectives")
      .def_property_readonly("name",
                             [](const comm::Collectives& c) { return std::string(c.name()); })
      .def_property_readonly("rank", &comm::Collectives::rank)
      .def_property_readonly("world_size", &comm::Collectives::world_size)
      .def("barrier", &comm::Collectives::barrier, py::call_guard<py::gil_scoped_release>())
      .def("all_gather_text", &comm::Collectives::all_gather_text,
           py::call_guard<py::gil_scoped_release>());

  module.def("single_rank",
             [] { return std::shared_ptr<comm::Collectives>(comm::LocalGroup(1).rank(0)); });
  module.def(
      "shm_collectives",
      [](c10::intrusive_ptr<c10d::Store> store, int rank, int world_size, double timeout_s) {
        const py::gil_scoped_release release;
        torch::StoreBootstrap bootstrap(std::move(store), rank, world_size,
                                        to_milliseconds(timeout_s));
        comm::CommOptions options;
        options.timeout = to_milliseconds(timeout_s);
        return std::shared_ptr<comm::Collectives>(comm::make_shm_collectives(bootstrap, options));
      },
      py::arg("store"), py::arg("rank"), py::arg("world_size"), py::arg("timeout_s"));
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
         std::string id, std::string name) {
        return std::shared_ptr<comm::Collectives>(torch::make_c10d_collectives(
            std::move(group), std::move(store), std::move(id), std::move(name)));
      },
      py::arg("group"), py::arg("store"), py::arg("id"), py::arg("name"));
}

}  // namespace strata::python

// Shared by the binding files: the torch casters, and for each file the function that adds its part
// to the module.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <optional>

#include "strata/torch/sharded/sharded_model.h"

// Modules with other internals cannot take torch's process groups and stores.
static_assert(PYBIND11_INTERNALS_VERSION == STRATA_PYBIND11_INTERNALS,
              "another pybind11 was found before the one in torch's include folder");

namespace strata::python {

namespace py = pybind11;

using torch::ShardedModel;
using ModelClass = py::class_<ShardedModel, std::shared_ptr<ShardedModel>>;

// For calls without Python's lock.
inline const auto unlocked = py::call_guard<py::gil_scoped_release>();
template <typename Call>
auto without_lock(const Call& call) {
  const py::gil_scoped_release release;
  return call();
}

// `function` of the value, if there is one.
template <typename T, typename Function>
auto mapped(const std::optional<T>& value, const Function& function) {
  return value ? std::optional(std::invoke(function, *value)) : std::nullopt;
}

void bind_runtime(py::module_& module);
void bind_model(py::module_& module);
void bind_interception(py::module_& module);
void bind_checkpoint(py::module_& module);
void bind_training(py::module_& module);
void bind_losses(py::module_& module);
// Adds recipes, and how tiles are cut and used.
void bind_large_parameters(py::module_& module, ModelClass& model);
// Adds the trained parameters, their optimizers and the training states of each.
void bind_optimizer(py::module_& module, ModelClass& model);
// Adds the reports of steps.
void bind_steps(ModelClass& model);

// How start-up went on this rank, so far.
py::dict init_report(ShardedModel& model);
py::object placement(ShardedModel& model);
// Calls `function(phase, bytes done, bytes in all)`; does nothing if it is None.
engine::InitReport::Progress progress_from(const py::object& function);
// A warning of the logger "strata"; from any thread.
void warn(const std::string& text);
// GB/s from pinned memory to the model's device; None where that is the host, or has no room to
// try.
std::optional<double> measure_link(ShardedModel& model);

// A Python function that C++ may drop without holding the GIL.
std::shared_ptr<py::function> held(py::function function);

}  // namespace strata::python

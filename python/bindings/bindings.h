// Shared by the binding files: the torch casters, and for each file the function that adds its part
// to the module.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "strata/format/manifest.h"
#include "strata/kernels/recipe.h"
#include "strata/torch/sharded/sharded_model.h"

namespace strata::python {

namespace py = pybind11;

void bind_errors(py::module_& module);
void bind_config(py::module_& module);
void bind_schedule(py::module_& module);
void bind_runtime(py::module_& module);
void bind_model(py::module_& module);
void bind_interception(py::module_& module);
void bind_optimizer(py::module_& module);
void bind_checkpoint(py::module_& module);
void bind_state(py::module_& module);
void bind_training(py::module_& module);
void bind_whole_checkpoint(py::module_& module);
void bind_recipe(py::module_& module);
// Adds the reports of steps.
void bind_steps(py::class_<torch::ShardedModel, std::shared_ptr<torch::ShardedModel>>& model);
// Adds the calls by which a rank leaves the others.
void bind_departure(py::class_<torch::ShardedModel, std::shared_ptr<torch::ShardedModel>>& model);

// Adds the calls that choose the trained parameters and their optimizer.
void bind_param_groups(
    py::class_<torch::ShardedModel, std::shared_ptr<torch::ShardedModel>>& model);
// Adds how tiles are cut and used.
void bind_tiles(py::module_& module,
                py::class_<torch::ShardedModel, std::shared_ptr<torch::ShardedModel>>& model);

// How start-up went on this rank, so far.
py::dict init_report(torch::ShardedModel& model);
py::object placement(torch::ShardedModel& model);
// Calls `function(phase, bytes done, bytes in all)`; does nothing if it is None.
engine::InitReport::Progress progress_from(const py::object& function);
// A warning of the logger "strata"; from any thread.
void warn(const std::string& text);
// GB/s from pinned memory to the model's device; None where that is the host, or has no room to
// try.
std::optional<double> measure_link(torch::ShardedModel& model);

// An object of its own in Python, which a vector would not be.
struct Recipe {
  kernels::Recipe steps;
};
// (parameter, recipe, dtype of the values)
using RecipeTuple = std::tuple<int, Recipe, at::ScalarType>;
// Collective: makes the values of parameters that were described without some.
void replay(torch::ShardedModel& model, const std::vector<RecipeTuple>& recipes);

// The role that format::name_of() calls so.
format::TensorRole role_from(const std::string& name);

// A Python function that C++ may drop without holding the GIL.
std::shared_ptr<py::function> held(py::function function);

}  // namespace strata::python

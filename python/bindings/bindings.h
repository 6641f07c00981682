// What the binding files share: the torch casters, and one function a file that adds its part.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "strata/torch/sharded_model.h"

namespace strata::python {

namespace py = pybind11;

void bind_errors(py::module_& module);
void bind_config(py::module_& module);
void bind_schedule(py::module_& module);
void bind_runtime(py::module_& module);
void bind_model(py::module_& module);
void bind_interception(py::module_& module);
void bind_checkpoint(py::module_& module);

}  // namespace strata::python

#include "bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "Strata's C++ engine, as the package strata uses it; not a public interface.";
  strata::python::bind_errors(module);
  strata::python::bind_config(module);
  strata::python::bind_schedule(module);
  strata::python::bind_runtime(module);
  strata::python::bind_recipe(module);
  strata::python::bind_model(module);
  strata::python::bind_interception(module);
  strata::python::bind_optimizer(module);
  strata::python::bind_checkpoint(module);
  strata::python::bind_state(module);
  strata::python::bind_training(module);
  strata::python::bind_whole_checkpoint(module);
}

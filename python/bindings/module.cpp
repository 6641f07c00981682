// The module: its errors, the schedules of learning rates, and what the other files bind.
#include <nlohmann/json.hpp>

#include "bindings.h"
#include "strata/engine/config/config_text.h"
#include "strata/engine/pass_state.h"
#include "strata/engine/schedule/loss_scaler.h"
#include "strata/engine/schedule/schedule.h"

namespace strata::python {
namespace {

// One Python class for each class of error. All derive from strata.Error, a RuntimeError: callers
// of a save function take a ValueError for another error. As in DeepSpeed, an error in a
// configuration is a ValueError, too, and a call out of order an AssertionError.
void bind_errors(py::module_& module) {
  const auto base = py::register_exception<Error>(module, "Error", PyExc_RuntimeError);
  const auto and_also = [&](PyObject* cls) { return py::make_tuple(base, py::handle(cls)); };
  const auto config =
      py::register_exception<ConfigError>(module, "ConfigError", and_also(PyExc_ValueError));
  py::register_exception<engine::JsonSyntaxError>(module, "JsonSyntaxError", config);
  py::register_exception<FormatError>(module, "FormatError", base);
  py::register_exception<IoError>(module, "IoError", base);
  py::register_exception<CommError>(module, "CommError", base);
  py::register_exception<OutOfMemoryError>(module, "OutOfMemoryError", base);
  const auto usage =
      py::register_exception<UsageError>(module, "UsageError", and_also(PyExc_AssertionError));
  py::register_exception<engine::MissingBackward>(module, "MissingBackward", usage);
  py::register_exception<DeviceError>(module, "DeviceError", base);
  py::register_exception<NumericsError>(module, "NumericsError", base);
  py::register_exception<engine::LossScaleError>(module, "LossScaleError", base);
  py::register_exception<InternalError>(module, "InternalError", base);
}

// (learning rates, pairs of betas or None), one entry a param group
py::object to_python(const engine::Rates& rates) {
  py::object betas = py::none();
  if (rates.betas) {
    py::list list;
    for (const engine::Betas& pair : *rates.betas)
      list.append(py::make_tuple(pair.beta1, pair.beta2));
    betas = list;
  }
  return py::make_tuple(rates.lrs, betas);
}

void bind_schedule(py::module_& module) {
  using engine::Scheduler;
  py::class_<Scheduler>(module, "Scheduler")
      .def(py::init([](const engine::Config& config, std::vector<double> lrs, bool has_betas) {
        return std::make_unique<Scheduler>(
            engine::make_schedule(config.scheduler.value().params, {std::move(lrs), has_betas}),
            config.scheduler->last_iteration);
      }))
      .def("initial",
           [](const Scheduler& s) -> py::object {
             const auto rates = s.initial();
             return rates ? to_python(*rates) : py::none();
           })
      .def("step", [](Scheduler& s) { return to_python(s.step()); })
      .def("step_to",
           [](Scheduler& s, std::int64_t iteration) { return to_python(s.step_to(iteration)); })
      .def("current", [](const Scheduler& s) { return to_python(s.current()); })
      .def_property("last_iteration", &Scheduler::last_iteration, &Scheduler::set_last_iteration);
}

}  // namespace
}  // namespace strata::python

PYBIND11_MODULE(_C, module) {
  module.doc() = "Strata's C++ engine, as the package strata uses it; not a public interface.";
  strata::python::bind_errors(module);
  strata::python::bind_config(module);
  strata::python::bind_schedule(module);
  strata::python::bind_runtime(module);
  strata::python::bind_model(module);
  strata::python::bind_interception(module);
  strata::python::bind_checkpoint(module);
  strata::python::bind_training(module);
}

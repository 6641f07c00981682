// One Python class for each class of error. All derive from strata.Error, a RuntimeError: callers
// of a save function take a ValueError for another error. As in DeepSpeed, an error in a
// configuration is a ValueError, too, and a call out of order an AssertionError.
#include "bindings.h"
#include "strata/engine/config/config_text.h"
#include "strata/engine/missing_backward.h"
#include "strata/engine/schedule/loss_scaler.h"

namespace strata::python {

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

}  // namespace strata::python

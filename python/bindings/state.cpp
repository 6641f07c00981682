// What training keeps of a parameter, as Python reads and sets it.
#include "bindings.h"
#include "strata/torch/sharded/state_values.h"

namespace strata::python {
namespace {

using torch::ShardedModel;
using torch::StateKind;
using torch::StateValues;

StateKind kind_of(const std::string& name) {
  if (name == "master") return StateKind::kMaster;
  if (name == "gradient") return StateKind::kGradient;
  if (name == "exp_avg") return StateKind::kFirstMoment;
  STRATA_ASSERT(name == "exp_avg_sq");
  return StateKind::kSecondMoment;
}

// `whole`: collective. None where there is no such state.
std::optional<at::Tensor> read_state(ShardedModel& model, int param, const std::string& name,
                                     bool whole) {
  StateValues values(model, param);
  return whole ? values.whole(kind_of(name)) : values.part(kind_of(name));
}

// Collective for masters. False where there is no such state.
bool write_state(ShardedModel& model, int param, const std::string& name, bool whole,
                 const at::Tensor& tensor) {
  StateValues values(model, param);
  return whole ? values.set_whole(kind_of(name), tensor) : values.set_part(kind_of(name), tensor);
}

}  // namespace

void bind_state(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  module.def("read_state", &read_state, py::arg("model"), py::arg("parameter"), py::arg("name"),
             py::arg("whole"), unlocked);
  module.def("write_state", &write_state, py::arg("model"), py::arg("parameter"), py::arg("name"),
             py::arg("whole"), py::arg("values"), unlocked);
  // Of a state that Python keeps: whole of all ranks' parts, or None where a rank lacks its part.
  module.def(
      "join_state",
      [](ShardedModel& model, int param, const std::optional<at::Tensor>& mine) {
        return StateValues(model, param).joined(mine);
      },
      py::arg("model"), py::arg("parameter"), py::arg("mine"), unlocked);
  module.def("state_range",
             [](ShardedModel& model, int param) { return StateValues(model, param).range(); });
}

}  // namespace strata::python

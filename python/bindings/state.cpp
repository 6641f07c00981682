// The training states of a parameter, as Python reads and sets them.
#include "bindings.h"
#include "strata/engine/optimize/adam_optimizer.h"
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

// Stores masters of this rank's part, and the weights that they round to. No collective: only for
// values that round to the present weights.
void store_masters(ShardedModel& model, int param, const at::Tensor& values) {
  const auto [first, last] = StateValues(model, param).range();
  STRATA_ASSERT(values.scalar_type() == at::kFloat && values.numel() == last - first);
  engine::Engine& engine = model.engine();
  engine.require_intact_weights();
  engine.weights().store(param, Numel(first), Numel(last - first),
                         static_cast<const std::byte*>(values.const_data_ptr()), DType::kFloat32);
}

engine::AdamOptimizer* adam_of(ShardedModel& model) {
  return dynamic_cast<engine::AdamOptimizer*>(model.engine().optimizer());
}

// (steps of the engine's Adam, steps in which each parameter took part); None if another optimizer
// updates.
std::optional<std::pair<std::int64_t, std::vector<std::int64_t>>> adam_steps(ShardedModel& model) {
  model.engine().finish_step();
  const engine::AdamOptimizer* adam = adam_of(model);
  if (adam == nullptr) return std::nullopt;
  std::vector<std::int64_t> by_param;
  for (int param = 0; param < model.engine().weights().param_count(); ++param)
    by_param.push_back(adam->steps_of(param));
  return std::pair(adam->steps(), by_param);
}

// Sets Adam's steps and allocates its states, so that they can be written.
void set_adam_steps(ShardedModel& model, std::int64_t all,
                    const std::vector<std::int64_t>& by_param) {
  engine::Engine& engine = model.engine();
  engine.require_intact_weights();
  engine.state_offload().require_all("loading the optimizer's state");
  engine.finish_step();
  engine.prepare();
  STRATA_ASSERT(adam_of(model) != nullptr);
  adam_of(model)->set_steps(all, by_param);
}

}  // namespace

void bind_state(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  module.def("read_state", &read_state, py::arg("model"), py::arg("parameter"), py::arg("name"),
             py::arg("whole"), unlocked);
  module.def("write_state", &write_state, py::arg("model"), py::arg("parameter"), py::arg("name"),
             py::arg("whole"), py::arg("values"), unlocked);
  // Joins a state that Python keeps from all ranks' parts; None if a rank lacks its part.
  module.def(
      "join_state",
      [](ShardedModel& model, int param, const std::optional<at::Tensor>& mine) {
        return StateValues(model, param).joined(mine);
      },
      py::arg("model"), py::arg("parameter"), py::arg("mine"), unlocked);
  // Drops this rank's gradients of the step so far; `keep` sets them to zero instead.
  module.def(
      "zero_gradients", [](ShardedModel& model, bool keep) { model.passes().zero_gradients(keep); },
      py::arg("model"), py::arg("keep"), unlocked);
  // `whole`: a parameter of this shape whose rows are `tiles`.
  module.def(
      "show_tiled",
      [](ShardedModel& model, const at::Tensor& whole, const std::vector<std::int64_t>& shape,
         const std::vector<int>& tiles) {
        model.passes().shown_gradients().add_tiled(whole, shape, tiles);
      },
      py::arg("model"), py::arg("whole"), py::arg("shape"), py::arg("tiles"));
  module.def("micro_batches",
             [](ShardedModel& model) { return model.control().state().micro_batches; });
  module.def("store_masters", &store_masters, py::arg("model"), py::arg("parameter"),
             py::arg("values"), unlocked);
  module.def("adam_steps", &adam_steps, py::arg("model"), unlocked);
  module.def("set_adam_steps", &set_adam_steps, py::arg("model"), py::arg("all"),
             py::arg("by_parameter"), unlocked);
  module.def("state_range",
             [](ShardedModel& model, int param) { return StateValues(model, param).range(); });
}

}  // namespace strata::python

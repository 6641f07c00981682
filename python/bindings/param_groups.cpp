// The trained parameters, and the views of them that a user's optimizer gets.
#include "bindings.h"
#include "strata/torch/base/placement.h"

namespace strata::python {
namespace {

using torch::ShardedModel;

engine::ExternalOptimizer& external(ShardedModel& model) {
  auto* optimizer = dynamic_cast<engine::ExternalOptimizer*>(model.engine().optimizer());
  STRATA_ASSERT(optimizer != nullptr);
  return *optimizer;
}

at::Tensor view_of(std::span<float> values, at::Device place) {
  return torch::tensor_over(values.data(), static_cast<std::int64_t>(values.size()), at::kFloat,
                            place);
}

at::Device place_of(const engine::ExternalSegment& segment, at::Device of_model) {
  return segment.on_host ? at::Device(at::kCPU) : of_model;
}

// [(group, parameter, fp32 weight [numel])]: views of the engine's memory, on the host if the
// states lie there.
std::vector<std::tuple<int, int, at::Tensor>> segments(ShardedModel& model) {
  std::vector<std::tuple<int, int, at::Tensor>> result;
  for (const engine::ExternalSegment& s : external(model).segments())
    result.emplace_back(s.group, s.param, view_of(s.weight, place_of(s, model.place())));
  return result;
}

// `update` gets a list by segment: the fp32 gradient [numel], a view of the engine's memory, or
// None.
void set_update(ShardedModel& model, py::function update) {
  engine::ExternalOptimizer& optimizer = external(model);
  optimizer.set_update([shared = held(std::move(update)), place = model.place(),
                        &optimizer](std::span<const std::span<float>> gradients) {
    const py::gil_scoped_acquire acquire;
    py::list views;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const at::Device where = place_of(optimizer.segments()[i], place);
      views.append(gradients[i].empty() ? py::none() : py::cast(view_of(gradients[i], where)));
    }
    (*shared)(views);
  });
}

// Runs a Python function that moves states; its error about missing memory becomes Strata's.
template <typename Call>
void moving_states(Call&& call) {
  const py::gil_scoped_acquire acquire;
  try {
    std::forward<Call>(call)();
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_MemoryError)) throw OutOfMemoryError(py::str(error.value()));
    throw;
  }
}

// `offload_states` gets three flags: moments leave, masters or weights leave, pin host memory.
// `reload_states` gets none. StateOffload::Outside documents the times of the calls.
void set_outside_states(ShardedModel& model, py::function offload_states,
                        py::function reload_states) {
  engine::StateOffload::Outside outside;
  outside.offload_states = [shared = held(std::move(offload_states))](
                               const engine::StateSet& moving, bool pinned) {
    moving_states([&] { (*shared)(moving.moments, moving.masters || moving.weights, pinned); });
  };
  outside.reload_states = [shared = held(std::move(reload_states))] {
    moving_states([&] { (*shared)(); });
  };
  model.engine().state_offload().set_outside(std::move(outside));
}

// `told` gets the formerly frozen parameters that become trained.
void on_trained(ShardedModel& model, py::function told) {
  model.passes().frozen().on_trained([shared = held(std::move(told))](std::span<const int> params) {
    const py::gil_scoped_acquire acquire;
    (*shared)(std::vector<int>(params.begin(), params.end()));
  });
}

}  // namespace

void bind_param_groups(py::class_<ShardedModel, std::shared_ptr<ShardedModel>>& model) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  model.def("segments", &segments)
      .def("set_update",
           [](ShardedModel& m, py::function update) { set_update(m, std::move(update)); })
      .def("set_outside_states",
           [](ShardedModel& m, py::function offload_states, py::function reload_states) {
             set_outside_states(m, std::move(offload_states), std::move(reload_states));
           })
      .def(
          "train", [](ShardedModel& m, const std::vector<int>& p) { m.passes().frozen().train(p); },
          unlocked)
      .def("add_to_group", [](ShardedModel& m, const std::vector<int>& p,
                              int group) { m.passes().frozen().add_to_group(p, group); })
      .def("on_trained",
           [](ShardedModel& m, py::function told) { on_trained(m, std::move(told)); });
}

}  // namespace strata::python

// How a model's rank leaves its peers: it announces the reason, or leaves together with them.
#include "bindings.h"

namespace strata::python {
namespace {

using torch::ShardedModel;

void leave(ShardedModel& model, const std::string& reason) {
  model.engine().collectives().leave(reason);
}

// `words`: the reason, for the errors of peers that wait for this rank.
void announce_departure(ShardedModel& model, const std::string& words) {
  model.engine().collectives().announce_departure(words);
}

// Collective, at the end of a program.
void depart(ShardedModel& model) {
  model.wait_for_all();
  model.engine().collectives().all_left();
}

}  // namespace

void bind_departure(py::class_<ShardedModel, std::shared_ptr<ShardedModel>>& model) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  model.def("leave", &leave, py::arg("reason"), unlocked)
      .def("announce_departure", &announce_departure, py::arg("words"), unlocked)
      .def("depart", &depart, unlocked);
}

}  // namespace strata::python

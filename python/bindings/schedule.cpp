// Learning-rate schedules of the configuration.
#include "strata/engine/schedule/schedule.h"

#include "bindings.h"

namespace strata::python {
namespace {

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

}  // namespace

void bind_schedule(py::module_& module) {
  using engine::Scheduler;
  py::class_<Scheduler>(module, "Scheduler")
      .def(
          py::init([](const engine::Config& config, std::vector<double> lrs, bool has_betas) {
            return std::make_unique<Scheduler>(
                engine::make_schedule(config.scheduler.value().params, {std::move(lrs), has_betas}),
                config.scheduler->last_iteration);
          }),
          py::arg("config"), py::arg("group_lrs"), py::arg("has_betas"))
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

}  // namespace strata::python

// Updates of parameters that belong to no engine.
#include "bindings.h"
#include "strata/torch/base/host_adam.h"

namespace strata::python {
namespace {

using HostParameter = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, std::int64_t>;

void update_on_host(torch::HostAdam& adam, const std::vector<HostParameter>& parameters, double lr,
                    double beta1, double beta2, double eps, double weight_decay, bool decoupled,
                    bool bias_correction) {
  std::vector<torch::HostAdamTensors> tensors;
  for (const auto& [weight, gradient, exp_avg, exp_avg_sq, count] : parameters)
    tensors.push_back({weight, gradient, exp_avg, exp_avg_sq, count});
  kernels::AdamScalars scalars;
  scalars.lr = lr;
  scalars.beta1 = beta1;
  scalars.beta2 = beta2;
  scalars.eps = eps;
  scalars.weight_decay = weight_decay;
  scalars.decoupled = decoupled;
  scalars.bias_correction = bias_correction;
  const py::gil_scoped_release release;
  adam.step(tensors, scalars);
}

}  // namespace

void bind_optimizer(py::module_& module) {
  py::class_<torch::HostAdam>(module, "HostAdam")
      .def(py::init<int>(), py::arg("world_size"))
      .def_property_readonly("threads", &torch::HostAdam::threads)
      // parameters: [(weight, gradient, exp_avg, exp_avg_sq, step from 1)].
      .def("step", &update_on_host, py::arg("parameters"), py::arg("lr"), py::arg("beta1"),
           py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("decoupled"),
           py::arg("bias_correction"));
}

}  // namespace strata::python

// The module: its errors, the configuration as Python reads it, the schedules of learning rates,
// and what the other files bind.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "bindings.h"
#include "strata/engine/config/config_text.h"
#include "strata/engine/config/value_check.h"
#include "strata/engine/pass_state.h"
#include "strata/engine/schedule/loss_scaler.h"
#include "strata/engine/schedule/schedule.h"
#include "strata/torch/base/tensors.h"

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

// None, or (kind, torch class, torch keyword arguments as JSON, Adam's options as a dict)
py::object optimizer_of(const engine::Config& config) {
  if (!config.optimizer) return py::none();
  const auto& o = *config.optimizer;
  const py::dict adam(py::arg("lr") = o.adam.lr,
                      py::arg("betas") = py::make_tuple(o.adam.beta1, o.adam.beta2),
                      py::arg("eps") = o.adam.eps, py::arg("weight_decay") = o.adam.weight_decay,
                      py::arg("bias_correction") = o.adam.bias_correction);
  const bool ours = o.kind == engine::OptimizerKind::kAdam;
  return py::make_tuple(ours ? (o.adam.decoupled ? "adamw" : "adam") : "torch", o.torch_class,
                        o.torch_params, adam);
}

// The same configuration for a model whose parameters are all sharded when they are made.
engine::Config for_construction(engine::Config c) {
  c.zero.stage = 3;
  c.zero.param_persistence_threshold = Numel();
  c.zero.model_persistence_threshold = Numel();
  c.offload.automatic = false;                  // the whole model is unknown as yet
  c.offload.optimizer = memory::Tier::kDevice;  // there is no optimizer
  for (engine::PlacementRule& rule : c.offload.rules) rule.optimizer.reset();
  // Each piece is written to a drive once and read once.
  const Numel staged(c.zero.partition_stream_chunk * 3 / size_of(DType::kFloat32));
  c.offload.param_staging = std::min(c.offload.param_staging, staged);
  return c;
}

std::string tier_name(memory::Tier tier) {
  return std::string(memory::name_of(tier));
}

// The tiers in which states of some parameter may lie between steps.
std::set<std::string> states_tiers(const engine::Config& c) {
  std::set<std::string> names{tier_name(c.offload.optimizer)};
  for (const memory::Tier tier : c.offload.optimizer_tiers()) names.insert(tier_name(tier));
  return names;
}

void bind_values(py::class_<engine::Config>& config) {
  using engine::Config;
  const auto read = [&](const char* name, auto value) {
    config.def_property_readonly(name, value);
  };
  read("stage", [](const Config& c) { return c.zero.stage; });
  read("optimizer_tier", [](const Config& c) { return tier_name(c.offload.optimizer); });
  read("states_tiers", &states_tiers);
  read("param_tier", [](const Config& c) { return tier_name(c.offload.param); });
  read("move_inputs", [](const Config& c) { return c.strata.move_inputs; });
  read("cuda_graphs", [](const Config& c) { return c.strata.cuda_graphs; });
  read("train_batch_size", [](const Config& c) { return c.batch.train_batch_size; });
  read("micro_batch_size", [](const Config& c) { return c.batch.micro_batch_size; });
  read("accumulation_steps", [](const Config& c) { return c.batch.accumulation_steps; });
  read("gather_16bit_weights_on_model_save",
       [](const Config& c) { return c.zero.gather_16bit_weights_on_model_save; });
  read("partition_stream_chunk",
       [](const Config& c) { return c.zero.partition_stream_chunk.value; });
  read("timeout_s", [](const Config& c) { return c.strata.timeout_s; });
  read("threads", [](const Config& c) { return c.strata.threads; });
  read("replay_above", [](const Config& c) { return c.strata.replay_above.value; });
  read("init_report", [](const Config& c) { return c.strata.init_report; });
  read("tile_max", [](const Config& c) { return mapped(c.strata.tile_max, &Bytes::value); });
  read("tile_matches", [](const Config& c) { return c.strata.tile_matches; });
  read("trace", [](const Config& c) { return c.strata.trace; });
  read("loss", [](const Config& c) { return c.strata.loss; });
  read("mlp_piece", [](const Config& c) { return c.strata.mlp_piece; });
  read("activations", [](const Config& c) { return c.strata.activations; });
  read("optimizer", &optimizer_of);
  read("states_8bit", [](const Config& c) { return c.strata.states_8bit; });
  read("has_scheduler", [](const Config& c) { return c.scheduler.has_value(); });
  // (class of torch.optim.lr_scheduler, keyword arguments as JSON)
  read("torch_scheduler", [](const Config& c) {
    return mapped(c.torch_scheduler, [](const auto& s) { return std::pair(s.type, s.params); });
  });
  read("dtype", [](const Config& c) {
    return mapped(c.precision.param_dtype, [](DType dtype) { return std::string(name_of(dtype)); });
  });
  read("autocast_dtype",
       [](const Config& c) { return mapped(c.precision.autocast, &torch::to_scalar_type); });
  read("grad_accum_dtype",
       [](const Config& c) { return torch::to_scalar_type(c.precision.grad_accum_dtype); });
  read("cast_inputs", [](const Config& c) { return c.precision.cast_inputs; });
  read("hints", [](const Config& c) {  // (path, reason, whether its effect is missed)
    std::vector<std::tuple<std::string, std::string, bool>> hints;
    for (const auto& [path, reason, missed] : c.hints) hints.emplace_back(path, reason, missed);
    return hints;
  });
}

void bind_config(py::module_& module) {
  // Bytes of a text such as "5GB" or "512mib"; None for any other.
  module.def("parse_size", [](const std::string& text) {
    return mapped(engine::parse_size(text, engine::SizeText::kAnyCase), &engine::clamped);
  });
  using engine::Config;
  py::class_<Config> config(module, "Config");
  config.def_static("parse", &Config::parse)
      .def_static("document",  // the JSON object in the text, if it is right
                  [](const std::string& text) {
                    Config::parse(text);
                    return engine::canonical_text(engine::open_document(text));
                  })
      .def("complete_batch", &Config::complete_batch)
      .def("require_filled_in", &Config::require_filled_in)
      .def("require_for_training", &Config::require_for_training)
      .def("digest", &Config::digest)
      .def("for_construction", &for_construction)
      .def("weight_dtype",
           [](const Config& c, at::ScalarType own) {
             return torch::to_scalar_type(c.precision.weight_dtype(torch::from_scalar_type(own)));
           })
      .def_readonly("steps_per_print", &Config::steps_per_print)
      .def_readonly("async_checkpoints", &Config::async_checkpoints)
      .def_property_readonly(
          "updates_in_backward",
          [](const Config& c) { return c.strata.update_at == engine::UpdateAt::kBackward; })
      .def_readonly("drop_last", &Config::drop_last)
      .def_readwrite("sequence_parallel", &Config::sequence_parallel)
      .def_readonly("hint_values", &Config::hint_values)
      .def_readonly("shown", &Config::shown)  // the reports that its rank shows
      .def_readonly("shown_given", &Config::shown_given);
  bind_values(config);
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
  strata::python::bind_losses(module);
}

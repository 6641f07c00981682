// The configuration as Python reads it.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "bindings.h"
#include "strata/engine/config/value_check.h"
#include "strata/torch/base/dtype.h"

namespace strata::python {
namespace {

// Bytes of a text such as "5GB" or "512mib"; None for any other.
std::optional<std::int64_t> parse_size(const std::string& text) {
  const std::optional<double> bytes = engine::parse_size(text, engine::SizeText::kAnyCase);
  return bytes ? std::optional(engine::clamped(*bytes)) : std::nullopt;
}

// None, or (kind, torch class, torch keyword arguments as JSON, Adam's options as a dict)
py::object optimizer_of(const engine::Config& config) {
  if (!config.optimizer) return py::none();
  const auto& o = *config.optimizer;
  py::dict adam;
  adam["lr"] = o.adam.lr;
  adam["betas"] = py::make_tuple(o.adam.beta1, o.adam.beta2);
  adam["eps"] = o.adam.eps;
  adam["weight_decay"] = o.adam.weight_decay;
  adam["bias_correction"] = o.adam.bias_correction;
  const bool ours = o.kind == engine::OptimizerKind::kAdam;
  return py::make_tuple(ours ? (o.adam.decoupled ? "adamw" : "adam") : "torch", o.torch_class,
                        o.torch_params, adam);
}

// None, or (class of torch.optim.lr_scheduler, keyword arguments as JSON)
py::object torch_scheduler_of(const engine::Config& config) {
  if (!config.torch_scheduler) return py::none();
  return py::make_tuple(config.torch_scheduler->type, config.torch_scheduler->params);
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

// The tiers in which states of some parameter may lie between steps.
std::set<std::string> states_tiers(const engine::Config& c) {
  std::set<std::string> names{std::string(memory::name_of(c.offload.optimizer))};
  for (const memory::Tier tier : c.offload.optimizer_tiers()) names.emplace(memory::name_of(tier));
  return names;
}

void bind_precision(py::class_<engine::Config>& config) {
  using engine::Config;
  config
      .def("weight_dtype",
           [](const Config& c, at::ScalarType own) {
             return torch::to_scalar_type(c.precision.weight_dtype(torch::from_scalar_type(own)));
           })
      .def_property_readonly("dtype",
                             [](const Config& c) -> std::optional<std::string> {
                               const auto dtype = c.precision.param_dtype;
                               if (!dtype) return std::nullopt;
                               return std::string(name_of(*dtype));
                             })
      .def_property_readonly("autocast_dtype",
                             [](const Config& c) -> std::optional<at::ScalarType> {
                               const auto dtype = c.precision.autocast;
                               if (!dtype) return std::nullopt;
                               return torch::to_scalar_type(*dtype);
                             })
      .def_property_readonly(
          "grad_accum_dtype",
          [](const Config& c) { return torch::to_scalar_type(c.precision.grad_accum_dtype); })
      .def_property_readonly("cast_inputs",
                             [](const Config& c) { return c.precision.cast_inputs; });
}

// The configuration's hints and remarks for the user, and the reports that its rank shows.
void bind_config_findings(py::class_<engine::Config>& config) {
  using engine::Config;
  config
      .def_property_readonly("hints",
                             [](const Config& c) {
                               std::vector<std::pair<std::string, std::string>> hints;
                               for (const auto& hint : c.hints)
                                 hints.emplace_back(hint.path, hint.reason);
                               return hints;
                             })
      .def_readonly("hint_values", &Config::hint_values)
      .def_property_readonly("missed",  // the paths of hints whose effect is missed
                             [](const Config& c) {
                               std::set<std::string> paths;
                               for (const auto& hint : c.hints) {
                                 if (hint.missed) paths.insert(hint.path);
                               }
                               return paths;
                             })
      .def_readonly("shown", &Config::shown)
      .def_readonly("shown_given", &Config::shown_given);
}

}  // namespace

void bind_config(py::module_& module) {
  module.def("parse_size", &parse_size, py::arg("text"));
  using engine::Config;
  py::class_<Config> config(module, "Config");
  config.def_static("parse", &Config::parse, py::arg("text_or_path"))
      .def("complete_batch", &Config::complete_batch, py::arg("world_size"))
      .def("require_filled_in", &Config::require_filled_in, py::arg("section"))
      .def("require_for_training", &Config::require_for_training, py::arg("own_optimizer"),
           py::arg("own_scheduler"))
      .def("digest", &Config::digest)
      .def("for_construction", &for_construction)
      .def_property_readonly("stage", [](const Config& c) { return c.zero.stage; })
      .def_property_readonly(
          "optimizer_tier",
          [](const Config& c) { return std::string(memory::name_of(c.offload.optimizer)); })
      .def_property_readonly("states_tiers", &states_tiers)
      .def_property_readonly(
          "param_tier",
          [](const Config& c) { return std::string(memory::name_of(c.offload.param)); })
      .def_property_readonly("move_inputs", [](const Config& c) { return c.strata.move_inputs; })
      .def_property_readonly("train_batch_size",
                             [](const Config& c) { return c.batch.train_batch_size; })
      .def_property_readonly("micro_batch_size",
                             [](const Config& c) { return c.batch.micro_batch_size; })
      .def_property_readonly("accumulation_steps",
                             [](const Config& c) { return c.batch.accumulation_steps; })
      .def_readonly("gradient_clipping", &Config::gradient_clipping)
      .def_readonly("steps_per_print", &Config::steps_per_print)
      .def_readonly("async_checkpoints", &Config::async_checkpoints)
      .def_readonly("drop_last", &Config::drop_last)
      .def_property_readonly(
          "gather_16bit_weights_on_model_save",
          [](const Config& c) { return c.zero.gather_16bit_weights_on_model_save; })
      .def_property_readonly("timeout_s", [](const Config& c) { return c.strata.timeout_s; })
      .def_property_readonly("threads", [](const Config& c) { return c.strata.threads; })
      .def_property_readonly("replay_above",
                             [](const Config& c) { return c.strata.replay_above.value; })
      .def_property_readonly("partition_stream_chunk",
                             [](const Config& c) { return c.zero.partition_stream_chunk.value; })
      .def_property_readonly("init_report", [](const Config& c) { return c.strata.init_report; })
      .def_property_readonly("tile_max",
                             [](const Config& c) -> std::optional<std::int64_t> {
                               if (!c.strata.tile_max) return std::nullopt;
                               return c.strata.tile_max->value;
                             })
      .def_property_readonly("tile_matches", [](const Config& c) { return c.strata.tile_matches; })
      .def_property_readonly("trace", [](const Config& c) { return c.strata.trace; })
      .def_property_readonly("optimizer", &optimizer_of)
      .def_property_readonly("has_scheduler",
                             [](const Config& c) { return c.scheduler.has_value(); })
      .def_property_readonly("torch_scheduler", &torch_scheduler_of);
  bind_precision(config);
  bind_config_findings(config);
}

}  // namespace strata::python

// ShardedModel as Python drives it.
#include <ATen/ops/from_blob.h>

#include <functional>
#include <map>
#include <numeric>

#include "bindings.h"
#include "strata/torch/model/model_plan.h"

namespace strata::python {
namespace {

// (name, shape, the tile's first element in it, modules that use it) of a tile's whole parameter
using TileTuple = std::tuple<std::string, std::vector<std::int64_t>, std::int64_t, int>;
// (its rule, or None; bits of its states, or None; with 8 bits, the least elements of the whole
// parameter: a smaller one has 32; ParamSpec::matrices_apart; ParamSpec::matrix_cost of the whole)
using RuleTuple =
    std::tuple<std::optional<std::string>, std::optional<int>, std::int64_t, bool, double>;
// (name, tensor, full shape, has values, group, owner, index there, tile, rule)
using ParameterTuple = std::tuple<std::string, at::Tensor, std::vector<std::int64_t>, bool, int,
                                  std::shared_ptr<ShardedModel>, int, std::optional<TileTuple>,
                                  std::optional<RuleTuple>>;
// (path, class name, parent, own parameters, callable, read in backward, leaf)
using ModuleTuple = std::tuple<std::string, std::string, int, std::vector<int>, bool, bool, bool>;
// (lr, beta1, beta2, eps, weight decay)
using GroupTuple = std::tuple<double, double, double, double, double, bool>;

std::optional<plan::TileOf> tile_from(const std::optional<TileTuple>& tile) {
  if (!tile) return std::nullopt;
  const auto& [name, shape, first, uses] = *tile;
  return plan::TileOf{name, shape, Numel(first), uses};
}

torch::ModelInput input_from(const std::vector<ParameterTuple>& parameters,
                             const std::vector<ModuleTuple>& modules) {
  torch::ModelInput input;
  for (const auto& [name, tensor, shape, has_values, group, owner, owner_index, tile, rule] :
       parameters) {
    auto [own, bits, least, apart, cost] = rule.value_or(RuleTuple{});
    const auto& whole = tile ? std::get<1>(*tile) : shape;
    const std::int64_t numel =
        std::accumulate(whole.begin(), whole.end(), std::int64_t{1}, std::multiplies<>());
    if (tile && whole.front() > 0)
      cost *= static_cast<double>(shape.front()) / static_cast<double>(whole.front());
    if (bits == 8 && numel < least) bits = 32;
    input.parameters.push_back({name, tensor, shape, has_values, group, owner, owner_index,
                                tile_from(tile), mapped(own, &plan::rule_named),
                                mapped(bits, &plan::form_of_bits), apart, cost});
  }
  for (const auto& [path, class_name, parent, params, callable, read_in_backward, leaf] : modules)
    input.tree.push_back({path, class_name, parent, params, callable, read_in_backward, leaf});
  return input;
}

// The last reference may be dropped with Python's lock held. The destructor waits for the model's
// threads, which may need that lock to free objects of Python.
void destroy_unlocked(ShardedModel* model) {
  if (PyGILState_Check() == 0) {
    delete model;
    return;
  }
  const py::gil_scoped_release release;
  delete model;
}

std::shared_ptr<ShardedModel> make_model(const std::vector<ParameterTuple>& parameters,
                                         const std::vector<ModuleTuple>& modules,
                                         const engine::Config& config, const std::string& rule,
                                         torch::ModelRuntime runtime, std::string name,
                                         const py::object& progress) {
  const torch::ModelInput input = input_from(parameters, modules);
  runtime.progress = progress_from(progress);
  runtime.warn = &warn;
  const py::gil_scoped_release release;
  return {
      new ShardedModel(input, config, plan::rule_named(rule), std::move(runtime), std::move(name)),
      &destroy_unlocked};
}

std::vector<engine::GroupScalars> scalars_from(const std::vector<GroupTuple>& groups) {
  std::vector<engine::GroupScalars> scalars;
  for (const auto& [lr, beta1, beta2, eps, decay, correction] : groups)
    scalars.push_back({lr, beta1, beta2, eps, decay, correction});
  return scalars;
}

// None at a micro-step that is no boundary, else (whether the weights were updated, or None if the
// device has not reported it yet; a message for the user, or "").
py::object step(ShardedModel& model, const std::vector<GroupTuple>& groups) {
  const std::vector<engine::GroupScalars> scalars = scalars_from(groups);
  const auto result = without_lock([&] { return model.step(scalars); });
  if (!result) return py::none();
  const auto applied = mapped(result->grad_norm, [&](double) { return result->applied; });
  return py::make_tuple(applied, result->warning);
}

// `states`: DeepSpeed's names of states. False: the weights were among them, and do not move.
bool offload_states(ShardedModel& model, const std::vector<std::string>& states, bool pinned) {
  const std::map<std::string, bool engine::StateSet::*> flags{
      {"optim_states", &engine::StateSet::moments},
      {"hp_params", &engine::StateSet::masters},
      {"lp_params", &engine::StateSet::weights},
      {"lp_grads", &engine::StateSet::gradients},
      {"contiguous_grad_buffer", &engine::StateSet::gradient_buffers}};
  engine::StateSet set;
  for (const std::string& name : states) set.*flags.at(name) = true;
  return without_lock([&] { return model.offload_states(set, pinned); });
}

memory::Tier tier_from(const std::string& name) {
  for (const memory::Tier tier :
       {memory::Tier::kDevice, memory::Tier::kHost, memory::Tier::kNvme}) {
    if (name == name_of(tier)) return tier;
  }
  throw UsageError("a memory forecast is of the tier 'device', 'host' or 'nvme'; found '{}'", name);
}

// {kind: peak bytes} of a tier, and "total". Excludes workspaces of kernels, which no forecast
// knows.
py::dict as_dict(const forecast::MemoryForecast& forecast, memory::Tier tier) {
  py::dict result;
  for (int k = 0; k < memory::kKindCount; ++k) {
    const auto kind = static_cast<memory::Kind>(k);
    if (kind == memory::Kind::kWorkspace) continue;
    result[py::str(std::string(name_of(kind)))] = forecast.on(tier, kind).value;
  }
  result["total"] = forecast.total_on(tier).value;
  return result;
}

py::dict memory_forecast(ShardedModel& model, const std::string& tier) {
  const memory::Tier wanted = tier_from(tier);
  return as_dict(without_lock([&] { return model.memory_forecast(); }), wanted);
}

// The forecast of a job that does not run. `config.batch` must be complete for its number of ranks.
// `device_memory`, `host_memory`: free bytes of a device and of a host, or None; used if placement
// is automatic.
py::dict forecast_job(const std::vector<ParameterTuple>& parameters,
                      const std::vector<ModuleTuple>& modules, const engine::Config& config,
                      const std::string& rule, int world_size, bool on_gpus, int ranks_per_host,
                      const std::string& tier, std::optional<std::int64_t> device_memory,
                      std::optional<std::int64_t> host_memory) {
  const torch::ModelInput input = input_from(parameters, modules);
  const forecast::Job job{world_size, on_gpus, ranks_per_host};
  const auto bytes = [](std::int64_t count) { return Bytes(count); };
  const forecast::FreeMemory free =
      forecast::free_memory_of(job, mapped(device_memory, bytes), mapped(host_memory, bytes));
  const forecast::Trainers trainers = forecast::trainers_of(config, plan::rule_named(rule), job);
  const torch::PlannedModel model =
      torch::plan_model(input, config, trainers, forecast::room_for(config.offload, free));
  return as_dict(forecast::forecast_training(model.specs, model.plan, model.tree, config, trainers),
                 tier_from(tier));
}

// {(tier, kind): (held, peak)} in bytes; (tier, "total") for the tier.
py::dict memory_report(ShardedModel& model) {
  py::dict report;
  memory::Ledger& ledger = model.ledger();
  for (int t = 0; t < memory::kTierCount; ++t) {
    const auto tier = static_cast<memory::Tier>(t);
    const std::string tier_name(name_of(tier));
    for (int k = 0; k < memory::kKindCount; ++k) {
      const auto kind = static_cast<memory::Kind>(k);
      report[py::make_tuple(tier_name, std::string(name_of(kind)))] =
          py::make_tuple(ledger.held(tier, kind).value, ledger.peak(tier, kind).value);
    }
    report[py::make_tuple(tier_name, "total")] =
        py::make_tuple(ledger.held(tier).value, ledger.peak(tier).value);
  }
  return report;
}

// uint8 memory for copies from and to the device, zeroes; pinned if the system can.
at::Tensor host_memory(const std::shared_ptr<ShardedModel>& model, std::int64_t bytes) {
  std::shared_ptr<device::HostMemory> memory =
      model->engine().device().allocate_host(Bytes(bytes), memory::Kind::kActivations);
  void* const data = memory->bytes().data();
  // The memory is freed through its device, which lives as long as the model.
  const auto free = [model, memory](void*) mutable { memory.reset(); };
  return at::from_blob(data, {bytes}, free, at::kByte);
}

py::list units(ShardedModel& model) {
  py::list result;
  for (const engine::Unit& unit : model.engine().weights().units())
    result.append(py::dict(py::arg("name") = unit.name(), py::arg("params") = unit.spec.params,
                           py::arg("dtype") = std::string(name_of(unit.layout.dtype())),
                           py::arg("trainable") = unit.trainable(), py::arg("whole") = unit.whole,
                           py::arg("shard_numel") = unit.layout.shard().value,
                           py::arg("flat_bytes") = unit.layout.flat_bytes().value));
  return result;
}

void leave(ShardedModel& model, const std::string& reason) {
  model.engine().collectives().leave(reason);
}

void announce_departure(ShardedModel& model, const std::string& words) {
  model.engine().collectives().announce_departure(words);
}

// Collective, at the end of a program.
void depart(ShardedModel& model) {
  model.wait_for_all();
  model.engine().collectives().all_left();
}

// Calls a function of the model's StepControl.
template <auto Function>
auto of_control(ShardedModel& model) {
  return (model.control().*Function)();
}

void bind_passes(ModelClass& model) {
  using engine::StepControl;
  model.def("begin_forward", &ShardedModel::begin_forward, unlocked)
      .def("begin_backward",
           [](ShardedModel& m, const std::vector<GroupTuple>& groups) {
             without_lock([&] { m.begin_backward(scalars_from(groups)); });
           })
      .def("end_backward", &ShardedModel::end_backward, unlocked)
      .def("abandon_backward", &ShardedModel::abandon_backward, unlocked)
      .def("scale", &ShardedModel::scale, unlocked)
      .def("step", &step)
      .def("offload_states", &offload_states)
      .def("reload_states", &ShardedModel::reload_states, unlocked)
      .def("require_no_state_away",
           [](ShardedModel& m, const std::string& call) {
             m.engine().state_offload().require_all(call);
           })
      .def("require_weights",
           [](ShardedModel& m, const std::string& call) {
             m.engine().state_offload().require_weights(call);
           })
      .def(
          "finish_step", [](ShardedModel& m) { m.engine().finish_step(); }, unlocked)
      .def("factored", &ShardedModel::factored, unlocked)
      .def("at_boundary", &of_control<&StepControl::at_boundary>)
      .def("ends_step", &of_control<&StepControl::ends_step>)
      .def("set_boundary",
           [](ShardedModel& m, std::optional<bool> b) { m.control().set_boundary(b); })
      .def("set_synchronise", [](ShardedModel& m, bool s) { m.control().set_synchronise(s); })
      .def("set_accumulation_steps",
           [](ShardedModel& m, std::int64_t n) { m.control().set_accumulation_steps(n); })
      .def_property_readonly("backward_passes",
                             [](ShardedModel& m) { return m.engine().backward_passes(); })
      .def_property_readonly("accumulation_steps", &of_control<&StepControl::accumulation_steps>)
      .def_property_readonly("micro_steps", &of_control<&StepControl::micro_steps>)
      .def_property_readonly("global_steps", &of_control<&StepControl::global_steps>)
      .def(
          "skipped_steps",
          [](ShardedModel& m, bool wait) { return m.control().skipped_steps(wait); },
          py::arg("wait"), unlocked)
      .def_property_readonly(
          "last_step_applied",
          py::cpp_function(&of_control<&StepControl::last_step_applied>, unlocked))
      .def_property_readonly("grad_norm",
                             py::cpp_function(&of_control<&StepControl::grad_norm>, unlocked))
      .def_property_readonly("loss_scale",
                             [](ShardedModel& m) { return m.control().loss_scaler().scale(); });
}

void bind_access(ModelClass& model) {
  model
      .def(
          "gather", [](ShardedModel& m, const std::vector<int>& p) { m.gather(p); }, unlocked)
      .def(
          "release",
          [](ShardedModel& m, const std::vector<int>& p, bool discard) { m.release(p, discard); },
          unlocked)
      .def(
          "publish",
          [](ShardedModel& m, const std::vector<int>& p, int root) { m.values().publish(p, root); },
          unlocked)
      .def("index_of", &ShardedModel::index_of)
      .def("held_elsewhere", [](ShardedModel& m, int p) { return m.values().held_elsewhere(p); })
      .def("replaced", &ShardedModel::replaced)
      .def("put_back",
           [](ShardedModel& m, const std::vector<int>& params) {
             for (const int param : params) m.parameters().put_back(param);
           })
      .def(
          "require_own_memory", [](ShardedModel& m) { m.values().require_own_memory(); }, unlocked)
      .def("local_part", [](ShardedModel& m, int p) { return m.values().local_part(p); })
      .def("read", &ShardedModel::read, unlocked)
      .def("parameter_name",
           [](ShardedModel& m, int p) { return m.engine().weights().param(p).name; })
      .def("full_shape", [](ShardedModel& m, int p) { return m.engine().weights().param(p).shape; })
      .def("channels_last", &ShardedModel::channels_last)
      .def("free_originals", &ShardedModel::free_originals)
      .def("is_sharded",
           [](ShardedModel& m, int p) { return !m.engine().weights().unit_of(p).whole; })
      .def("scopes",
           [](const ShardedModel& m) {
             std::vector<int> modules;
             for (const auto& scope : m.plan().scopes) modules.push_back(scope.module);
             return modules;
           })
      .def("scope_needed", [](ShardedModel& m, int scope) { return m.scopes().needed(scope); })
      .def("memory_report", &memory_report)
      .def("host_memory", &host_memory, unlocked)
      .def("memory_forecast", &memory_forecast)
      .def("reset_memory_peaks", [](ShardedModel& m) { m.ledger().reset_peaks(); })
      .def("init_report", &init_report)
      .def("placement", &placement)
      .def("measure_link", &measure_link, unlocked)
      .def("units", &units)
      .def("destroy", &ShardedModel::destroy, unlocked)
      .def("wait_for_all", &ShardedModel::wait_for_all, unlocked)
      .def("leave", &leave, unlocked)
      .def("announce_departure", &announce_departure, unlocked)
      .def("depart", &depart, unlocked)
      .def(
          "free_gathered", [](ShardedModel& m) { m.passes().free_gathered(); }, unlocked)
      .def_property_readonly("sanity_checks",
                             [](const ShardedModel& m) { return m.config().zero.sanity_checks; })
      .def_property_readonly("device", &ShardedModel::place)
      .def_property_readonly("alive", &ShardedModel::alive);
}

}  // namespace

void bind_model(py::module_& module) {
  // Python stores attributes on it: the keepers of states that the engine does not hold.
  ModelClass model(module, "ShardedModel", py::dynamic_attr());
  model.def(py::init(&make_model), py::arg("parameters"), py::arg("modules"), py::arg("config"),
            py::arg("rule"), py::arg("runtime"), py::arg("name"), py::arg("progress") = py::none());
  module.def("forecast_job", &forecast_job);
  bind_passes(model);
  bind_access(model);
  bind_large_parameters(module, model);
  bind_optimizer(module, model);
  bind_steps(model);
}

}  // namespace strata::python

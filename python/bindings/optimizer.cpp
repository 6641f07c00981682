// The trained parameters, the optimizers that update them, and the training states of each.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <map>

#include "bindings.h"
#include "strata/base/thread_pool.h"
#include "strata/engine/optimize/native_optimizer.h"
#include "strata/engine/unit/agreement.h"
#include "strata/kernels/adam.h"
#include "strata/kernels/states8.h"
#include "strata/offload/state_store.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/base/tensors.h"

namespace strata::python {
namespace {

using torch::StateValues;

// (weight, gradient, exp_avg, exp_avg_sq, step of this update from 1). The tensors have one shape
// and are float32, bfloat16 or float16; both moments have the same dtype.
using HostParameter = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, std::int64_t>;

void check_update_tensors(const HostParameter& parameter) {
  const auto& [weight, gradient, exp_avg, exp_avg_sq, step] = parameter;
  if (exp_avg.scalar_type() != exp_avg_sq.scalar_type())
    throw UsageError("both moments of a parameter are of one type; found {} and {}",
                     c10::toString(exp_avg.scalar_type()), c10::toString(exp_avg_sq.scalar_type()));
  for (const at::Tensor& tensor : {weight, gradient, exp_avg, exp_avg_sq}) {
    if (!tensor.device().is_cpu() || tensor.layout() != c10::kStrided)
      throw UsageError("Adam on the host updates dense tensors in host memory; found one on {}, {}",
                       tensor.device().str(), tensor.is_sparse() ? "sparse" : "dense");
    if (!tensor.sizes().equals(weight.sizes()))
      throw UsageError(
          "a parameter, its gradient and its moments have one shape; load states that belong to "
          "this parameter; found {} elements and {}",
          weight.numel(), tensor.numel());
  }
}

// Tensors whose elements lie in one order: each is the original, or a copy.
class AlignedTensors {
 public:
  explicit AlignedTensors(const HostParameter& original) : original_(original) {
    const auto& [weight, gradient, exp_avg, exp_avg_sq, step] = original;
    weight_ = weight.detach();
    if (!weight.is_non_overlapping_and_dense()) weight_ = weight_.contiguous();
    gradient_ = as_weight(gradient);
    exp_avg_ = as_weight(exp_avg);
    exp_avg_sq_ = as_weight(exp_avg_sq);
  }

  kernels::AdamTensor tensor() const {
    const auto bytes = [](const at::Tensor& t) { return static_cast<std::byte*>(t.data_ptr()); };
    return {.weight = bytes(weight_),
            .weight_dtype = torch::from_scalar_type(weight_.scalar_type()),
            .exp_avg = bytes(exp_avg_),
            .exp_avg_sq = bytes(exp_avg_sq_),
            .moment_dtype = torch::from_scalar_type(exp_avg_.scalar_type()),
            .gradient = bytes(gradient_),
            .gradient_dtype = torch::from_scalar_type(gradient_.scalar_type()),
            .numel = Numel(weight_.numel()),
            .step = std::get<4>(original_)};
  }

  void write_back() const {
    const auto& [weight, gradient, exp_avg, exp_avg_sq, step] = original_;
    write_back(exp_avg, exp_avg_);
    write_back(exp_avg_sq, exp_avg_sq_);
    if (weight_.is_alias_of(weight))
      weight.unsafeGetTensorImpl()->bump_version();
    else
      weight.copy_(weight_);
  }

 private:
  at::Tensor as_weight(const at::Tensor& tensor) const {
    if (tensor.strides().equals(weight_.strides())) return tensor.detach();
    at::Tensor copy = at::empty_like(weight_, tensor.options());
    copy.copy_(tensor);
    return copy;
  }
  static void write_back(const at::Tensor& original, const at::Tensor& used) {
    if (!used.is_alias_of(original)) original.copy_(used);
  }

  const HostParameter& original_;
  at::Tensor weight_, gradient_, exp_avg_, exp_avg_sq_;
};

// Adam and AdamW over torch tensors in host memory, computed by this rank's threads. Optimizers
// that run without an engine use it. Tensors need not be contiguous: if a tensor's elements lie in
// another order than its parameter's, the update works on a copy and writes the result back. Its
// threads start in the first step. UsageError for tensors that it cannot update, before it writes
// anything.
class HostAdam {
 public:
  // `world_size`: the number of ranks, which decides the number of threads (placement.h).
  explicit HostAdam(int world_size) : threads_(torch::host_threads(std::nullopt, world_size)) {}

  int threads() const { return threads_; }
  // Without Python's lock. Autograd does not record the update, but it sees that the weights have
  // changed.
  void step(const std::vector<HostParameter>& parameters, double lr, double beta1, double beta2,
            double eps, double weight_decay, bool decoupled, bool bias_correction) {
    const at::NoGradGuard no_graph;
    std::ranges::for_each(parameters, check_update_tensors);
    const std::vector<AlignedTensors> aligned(parameters.begin(), parameters.end());
    std::vector<kernels::AdamTensor> tensors;
    for (const AlignedTensors& parameter : aligned) tensors.push_back(parameter.tensor());
    if (!pool_) pool_.emplace(threads_, torch::host_cores(threads_));
    kernels::adam_step(tensors,
                       {.lr = lr,
                        .beta1 = beta1,
                        .beta2 = beta2,
                        .eps = eps,
                        .weight_decay = weight_decay,
                        .bias_correction = bias_correction,
                        .decoupled = decoupled},
                       &*pool_);
    for (const AlignedTensors& parameter : aligned) parameter.write_back();
  }

 private:
  int threads_;
  std::optional<ThreadPool> pool_;
};

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

// Parameters whose parts have values during their unit's update only, each with its unit.
std::vector<std::pair<int, int>> parts_on_drive(ShardedModel& model) {
  std::vector<std::pair<int, int>> params;
  for (const engine::ExternalSegment& s : external(model).segments()) {
    if (s.on_drive) params.emplace_back(s.param, model.engine().weights().unit_of(s.param).id);
  }
  return params;
}

// States of a user's optimizer rest on a drive between updates.
offload::StateStore& states_of(ShardedModel& model) {
  return model.engine().weights().states();
}

std::span<std::byte> host_bytes(const at::Tensor& values) {
  STRATA_ASSERT(values.is_cpu() && values.is_contiguous());
  return torch::mutable_bytes(values);
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

// Collective, between steps: `change` writes to the optimizer's parameters, and masters and weights
// follow on every rank.
void edit_masters(ShardedModel& model, const py::function& change) {
  engine::Engine& engine = model.engine();
  engine.require_intact_weights();
  engine.state_offload().require_all("changing the weights by the optimizer");
  engine.finish_step();
  engine.gatherer().invalidate(engine::Changed::kAll);
  engine.collectives().barrier();  // now no rank reads this rank's shard
  external(model).edit([&] {
    engine::agree_after(engine.collectives(), "changing the weights by the optimizer", [&] {
      const py::gil_scoped_acquire acquire;
      change();
    });
  });
  engine.weights_changed();
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

// `params`: {parameter: (factor, Nesterov)}. `orthogonalize` replaces [(parameter, bf16 values)].
void set_muon(ShardedModel& model, const std::map<int, std::pair<double, bool>>& params,
              py::function orthogonalize) {
  auto& native = dynamic_cast<engine::NativeOptimizer&>(*model.engine().optimizer());
  if (native.muon() == nullptr) return;  // no matrix trains
  std::vector<engine::MuonParam> by_param(model.specs().size());
  for (const auto& [param, settings] : params)
    engine::nth(by_param, param) = {settings.first, settings.second};
  native.muon()->set(std::move(by_param), [shared = held(std::move(orthogonalize)),
                                           place = model.place()](const auto& owned) {
    const py::gil_scoped_acquire acquire;
    const at::NoGradGuard no_graph;
    std::vector<std::pair<int, at::Tensor>> all;
    for (const auto& of : owned)
      all.emplace_back(of.param, torch::tensor_over(of.values.data(), std::ssize(of.values) / 2,
                                                    at::kBFloat16, place));
    (*shared)(all);
  });
}

// `told` gets the formerly frozen parameters that become trained.
void on_trained(ShardedModel& model, py::function told) {
  model.passes().frozen().on_trained([shared = held(std::move(told))](std::span<const int> params) {
    const py::gil_scoped_acquire acquire;
    (*shared)(std::vector<int>(params.begin(), params.end()));
  });
}

// `name`: "master", "gradient" or one of state_names(). `whole`: collective. None where there is
// no such state.
std::optional<at::Tensor> read_state(ShardedModel& model, int param, const std::string& name,
                                     bool whole) {
  StateValues values(model, param);
  return whole ? values.whole(name) : values.part(name);
}

// Collective for masters. False where there is no such state.
bool write_state(ShardedModel& model, int param, const std::string& name, bool whole,
                 const at::Tensor& tensor) {
  StateValues values(model, param);
  return whole ? values.set_whole(name, tensor) : values.set_part(name, tensor);
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

engine::NativeOptimizer* native_of(ShardedModel& model) {
  return dynamic_cast<engine::NativeOptimizer*>(model.engine().optimizer());
}

// (steps of the engine's own optimizer, steps in which each parameter took part); None if another
// one updates.
std::optional<std::pair<std::int64_t, std::vector<std::int64_t>>> native_steps(
    ShardedModel& model) {
  model.engine().finish_step();
  const engine::NativeOptimizer* native = native_of(model);
  if (native == nullptr) return std::nullopt;
  std::vector<std::int64_t> by_param;
  for (int param = 0; param < model.engine().weights().param_count(); ++param)
    by_param.push_back(native->states().steps_of(param));
  return std::pair(native->steps(), by_param);
}

// Sets these steps and allocates the states, so that they can be written.
void set_native_steps(ShardedModel& model, std::int64_t all,
                      const std::vector<std::int64_t>& by_param) {
  engine::Engine& engine = model.engine();
  engine.require_intact_weights();
  engine.state_offload().require_all("loading the optimizer's state");
  engine.finish_step();
  engine.prepare();
  STRATA_ASSERT(native_of(model) != nullptr);
  native_of(model)->states().set_steps(all, by_param);
}

// The names of the states that the engine keeps of a parameter, or of any; none if another
// optimizer updates.
std::vector<std::string> state_names(ShardedModel& model, std::optional<int> param) {
  std::vector<std::string> found;
  const engine::NativeOptimizer* native = native_of(model);
  for (const engine::Unit& unit : model.engine().weights().units()) {
    if (native == nullptr || (param && model.engine().weights().unit_of(*param).id != unit.id))
      continue;
    for (const std::string_view name : native->states().names(unit.id)) {
      if (std::ranges::find(found, name) == found.end()) found.emplace_back(name);
    }
  }
  return found;
}

void bind_states(py::module_& module) {
  module.def("has_8bit_states", [](ShardedModel& model) {
    const engine::NativeOptimizer* native = native_of(model);
    return native != nullptr &&
           std::ranges::any_of(model.engine().weights().units(), [&](const engine::Unit& unit) {
             return unit.trainable() && native->states().in_8_bits(unit.id);
           });
  });
  module.def("state_names", &state_names, py::arg("model"), py::arg("param") = py::none());
  module.def("read_state", &read_state, unlocked);
  module.def("write_state", &write_state, unlocked);
  // (codes, scales) of this rank's part of a state in 8 bits, on the host; None: there is none.
  module.def(
      "read_codes",
      [](ShardedModel& model, int param, const std::string& name) {
        const auto kept = StateValues(model, param).codes(name);
        return kept ? std::optional(std::pair(kept->codes, kept->scales)) : std::nullopt;
      },
      unlocked);
  // The value of each code in the map of the first or of the second moment.
  module.def("map8", [](bool is_signed) {
    return (is_signed ? kernels::signed_map8() : kernels::unsigned_map8()).values;
  });
  // Joins a state that Python keeps from all ranks' parts; None if a rank lacks its part.
  module.def(
      "join_state",
      [](ShardedModel& model, int param, const std::optional<at::Tensor>& mine) {
        return StateValues(model, param).joined(mine);
      },
      unlocked);
  // Gives every rank a whole state that one rank's Python keeps; None if none has it.
  module.def(
      "share_state",
      [](ShardedModel& model, int param, const std::optional<at::Tensor>& mine) {
        return StateValues(model, param).of_owner(mine);
      },
      unlocked);
  module.def("set_muon", &set_muon);
  module.def("edit_masters", &edit_masters, unlocked);
  module.def(
      "zero_gradients", [](ShardedModel& model, bool keep) { model.passes().zero_gradients(keep); },
      unlocked);
  // `whole`: a parameter of this shape whose rows are `tiles`.
  module.def("show_tiled",
             [](ShardedModel& model, const at::Tensor& whole,
                const std::vector<std::int64_t>& shape, const std::vector<int>& tiles) {
               model.passes().shown_gradients().add_tiled(whole, shape, tiles);
             });
  module.def("micro_batches",
             [](ShardedModel& model) { return model.control().state().micro_batches; });
  module.def("store_masters", &store_masters, unlocked);
  module.def("native_steps", &native_steps, unlocked);
  module.def("set_native_steps", &set_native_steps, unlocked);
  module.def("state_range",
             [](ShardedModel& model, int param) { return StateValues(model, param).range(); });
}

}  // namespace

void bind_optimizer(py::module_& module, ModelClass& model) {
  py::class_<HostAdam>(module, "HostAdam")
      .def(py::init<int>())
      .def_property_readonly("threads", &HostAdam::threads)
      .def("step", &HostAdam::step, unlocked);
  model.def("segments", &segments)
      .def("parts_on_drive", &parts_on_drive)
      // A contiguous tensor on the host goes to a block of the drive, or comes from it.
      .def(
          "shelf_add",
          [](ShardedModel& m, const std::string& name, std::int64_t bytes) {
            return states_of(m)
                .add_all({{name, Bytes(bytes), memory::Kind::kOptimizerState, memory::Tier::kNvme}})
                .front();
          },
          unlocked)
      .def(
          "shelf_put",
          [](ShardedModel& m, offload::BlockId block, const at::Tensor& values) {
            states_of(m).put(block, host_bytes(values));
          },
          unlocked)
      .def(
          "shelf_bring",
          [](ShardedModel& m, offload::BlockId block, const at::Tensor& values) {
            states_of(m).bring(block, host_bytes(values));
          },
          unlocked)
      .def("set_update", &set_update)
      .def("set_outside_states", &set_outside_states)
      .def(
          "train", [](ShardedModel& m, const std::vector<int>& p) { m.passes().frozen().train(p); },
          unlocked)
      .def("add_to_group", [](ShardedModel& m, const std::vector<int>& p,
                              int group) { m.passes().frozen().add_to_group(p, group); })
      .def("on_trained", &on_trained);
  bind_states(module);
}

}  // namespace strata::python

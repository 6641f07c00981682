#include "strata/torch/model/gradient_hooks.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "strata/base/error.h"
#include "strata/torch/base/dtype.h"

namespace strata::torch {
namespace {

namespace autograd = ::torch::autograd;

// What the hooks of one engine share; cleared when the engine goes.
struct Receiver {
  engine::Engine* engine = nullptr;
  AutogradPass* pass = nullptr;
  double factor = 1.0;
  c10::Device place = c10::kCPU;

  void take(int param, const at::Tensor& given) const {
    pass->begin();
    at::Tensor gradient = given.to(place);
    if (given.layout() != at::kStrided) gradient = made_dense(param, gradient);
    if (factor != 1.0) {
      const at::NoGradGuard no_grad;
      gradient = gradient.mul(factor);
    }
    // Kept until it is copied; after that the engine has the stream of this thread, on which torch
    // may use the memory again, wait for the copy.
    const DType type = from_scalar_type(gradient.scalar_type());
    const DType dtype = type == DType::kFloat64 ? DType::kFloat32 : type;
    auto dense =
        std::make_shared<const at::Tensor>(gradient.to(to_scalar_type(dtype)).contiguous());
    const auto* values = static_cast<const std::byte*>(dense->const_data_ptr());
    engine->add_gradient(param, values, dtype, std::move(dense));
  }

  // An embedding's rows that come more than once are summed in fp32, as the reduction sums.
  at::Tensor made_dense(int param, const at::Tensor& sparse) const {
    if (engine->collectives().rank() == 0) {
      TORCH_WARN_ONCE("the gradient of '", engine->weights().param(param).name,
                      "' is sparse, and is made dense, as the gradients of all such parameters "
                      "are; make the embedding with sparse=False, which computes the same");
    }
    const at::NoGradGuard no_grad;
    const bool is_double = sparse.scalar_type() == at::kDouble;
    return (is_double ? sparse : sparse.to(at::kFloat)).to_dense();
  }
};

class TakeGradient final : public autograd::FunctionPreHook {
 public:
  TakeGradient(std::shared_ptr<Receiver> receiver, int param)
      : receiver_(std::move(receiver)), param_(param) {}

  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    if (receiver_->engine == nullptr || gradients.empty() || !gradients[0].defined())
      return gradients;
    receiver_->take(param_, gradients[0]);
    return {at::Tensor()};
  }

 private:
  std::shared_ptr<Receiver> receiver_;
  int param_;
};

// On a parameter that was frozen when the engine was made, and has no place for gradients.
class RefuseGradient final : public autograd::FunctionPreHook {
 public:
  RefuseGradient(std::shared_ptr<Receiver> receiver, int param)
      : receiver_(std::move(receiver)), param_(param) {}

  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    if (receiver_->engine == nullptr) return gradients;
    throw UsageError(fmt::format(
        "parameter '{}' got a gradient, but it was frozen when the engine was made; set "
        "requires_grad before initialize()",
        receiver_->engine->weights().param(param_).name));
  }

 private:
  std::shared_ptr<Receiver> receiver_;
  int param_;
};

// Also of a parameter that requires no gradient now: when it does, autograd uses this node.
std::shared_ptr<autograd::Node> accumulator_of(at::Tensor variable) {
  const bool frozen = !variable.requires_grad();
  if (frozen) variable.set_requires_grad(true);
  std::shared_ptr<autograd::Node> node = autograd::impl::grad_accumulator(variable);
  if (frozen) variable.set_requires_grad(false);
  return node;
}

}  // namespace

struct GradientHooks::Nodes {
  std::shared_ptr<Receiver> receiver = std::make_shared<Receiver>();
  std::vector<std::pair<std::shared_ptr<autograd::Node>, autograd::FunctionPreHook*>> hooked;
  std::vector<autograd::Node*> trainable;

  void add(std::shared_ptr<autograd::Node> node, std::unique_ptr<autograd::FunctionPreHook> hook) {
    hooked.emplace_back(node, hook.get());
    node->add_pre_hook(std::move(hook));
  }
};

GradientHooks::GradientHooks(engine::Engine& engine, const ParameterSet& parameters,
                             AutogradPass& pass)
    : nodes_(std::make_unique<Nodes>()) {
  nodes_->receiver->engine = &engine;
  nodes_->receiver->pass = &pass;
  nodes_->receiver->place = parameters.place();
  for (int i = 0; i < parameters.size(); ++i) {
    const at::Tensor& variable = parameters.variable(i);
    if (engine.weights().param(i).trainable) {
      auto node = accumulator_of(variable);
      nodes_->trainable.push_back(node.get());
      nodes_->add(std::move(node), std::make_unique<TakeGradient>(nodes_->receiver, i));
    } else if (!variable.requires_grad() && variable.is_floating_point()) {
      nodes_->add(accumulator_of(variable), std::make_unique<RefuseGradient>(nodes_->receiver, i));
    }
  }
}

GradientHooks::~GradientHooks() {
  nodes_->receiver->engine = nullptr;
  for (const auto& [node, hook] : nodes_->hooked) {
    std::erase_if(node->pre_hooks(), [hook = hook](const auto& h) { return h.get() == hook; });
  }
}

bool GradientHooks::stored_by_running_graph() const {
  const auto* chosen = autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return true;  // all leaves are
  return std::any_of(nodes_->trainable.begin(), nodes_->trainable.end(), [&](auto* node) {
    const auto found = chosen->find(node);
    return found != chosen->end() && found->second.needed_;
  });
}

void GradientHooks::take(int param, const at::Tensor& gradient) {
  nodes_->receiver->take(param, gradient);
}

GradientHooks::Destination GradientHooks::begin_take(int param) {
  Receiver& receiver = *nodes_->receiver;
  const engine::Weights& weights = receiver.engine->weights();
  receiver.pass->begin();
  const engine::GradientPlace place = receiver.engine->reducer().begin_add(
      weights.trainable_unit_of(param).id, weights.slot_index_of(param));
  const auto options =
      at::TensorOptions().dtype(to_scalar_type(place.dtype)).device(receiver.place);
  at::Tensor values = at::for_blob(place.values, weights.param(param).shape)
                          .options(options)
                          .target_device(receiver.place)
                          .make_tensor();
  return {std::move(values), place.holds, receiver.factor};
}

void GradientHooks::end_take(int param) {
  engine::Engine& engine = *nodes_->receiver->engine;
  engine.reducer().end_add(engine.weights().unit_of(param).id,
                           engine.weights().slot_index_of(param));
}

void GradientHooks::set_factor(double factor) {
  nodes_->receiver->factor = factor;
}

}  // namespace strata::torch

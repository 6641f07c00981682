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
#include "strata/torch/base/tensors.h"

namespace strata::torch {
namespace {

namespace autograd = ::torch::autograd;

// State that the hooks of one engine share; cleared when the engine is destroyed.
struct Receiver {
  engine::Engine* engine = nullptr;
  const ParameterSet* parameters = nullptr;
  AutogradPass* pass = nullptr;
  double factor = 1.0;
  c10::Device place = c10::kCPU;
  bool took = false;      // this pass has brought a gradient
  std::vector<int> lent;  // parameters whose `.grad` is lent to the user's hooks

  at::Tensor& grad_of(int param) const { return parameters->variable(param).mutable_grad(); }

  // Puts a copy of the gradient into `.grad` until take_lent().
  void lend(int param, const at::Tensor& given) {
    pass->begin();
    const at::NoGradGuard no_grad;
    grad_of(param) = given.detach().mul(factor);
    lent.push_back(param);
  }
  // Takes the tensor that hooks have left in `.grad`.
  void take_lent(int param) {
    if (std::erase(lent, param) == 0) return;
    took = true;
    const at::Tensor left = std::exchange(grad_of(param), at::Tensor());
    if (left.defined()) hand_over(param, left, 1.0);
  }

  void take(int param, const at::Tensor& given) {
    pass->begin();
    took = true;
    hand_over(param, given, factor);
  }
  void hand_over(int param, const at::Tensor& given, double times) const {
    at::Tensor gradient = given.to(place);
    if (given.layout() != at::kStrided) gradient = made_dense(param, gradient);
    if (times != 1.0) {
      const at::NoGradGuard no_grad;
      gradient = gradient.mul(times);
    }
    // The gradient is kept until it is copied. Then the engine makes this thread's stream, on which
    // torch may reuse the memory, wait for the copy.
    const DType type = from_scalar_type(gradient.scalar_type());
    const DType dtype = type == DType::kFloat64 ? DType::kFloat32 : type;
    const bool channels_last = engine->weights().param(param).channels_last;
    auto dense = std::make_shared<const at::Tensor>(
        in_memory_order(gradient.to(to_scalar_type(dtype)), channels_last).contiguous());
    const auto* values = static_cast<const std::byte*>(dense->const_data_ptr());
    engine->add_gradient(param, values, dtype, std::move(dense));
  }

  // Rows of an embedding that occur more than once are summed in fp32, as the reduction does.
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

// Runs after the user's post-accumulate hooks.
class TakeLent final : public autograd::FunctionPostHook {
 public:
  TakeLent(std::shared_ptr<Receiver> receiver, int param)
      : receiver_(std::move(receiver)), param_(param) {}

  autograd::variable_list operator()(const autograd::variable_list& outputs,
                                     const autograd::variable_list& /*gradients*/) override {
    if (receiver_->engine != nullptr) receiver_->take_lent(param_);
    return outputs;
  }

 private:
  std::shared_ptr<Receiver> receiver_;
  int param_;
};

class TakeGradient final : public autograd::FunctionPreHook {
 public:
  TakeGradient(std::shared_ptr<Receiver> receiver, int param, autograd::Node* node)
      : receiver_(std::move(receiver)), param_(param), node_(node) {}

  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    if (receiver_->engine == nullptr || gradients.empty() || !gradients[0].defined())
      return gradients;
    // Autograd stores the gradient of a parameter in no param group.
    if (receiver_->engine->weights().param(param_).group < 0) return gradients;
    if (node_->tensor_post_acc_grad_hooks() == nullptr) {
      receiver_->take(param_, gradients[0]);
    } else {
      if (!std::exchange(takes_lent_, true))
        node_->add_post_hook(std::make_unique<TakeLent>(receiver_, param_));
      receiver_->lend(param_, gradients[0]);
    }
    return {at::Tensor()};
  }

 private:
  std::shared_ptr<Receiver> receiver_;
  int param_;
  autograd::Node* node_;     // that it hooks
  bool takes_lent_ = false;  // hooks are rare, and cost every pass
};

// Makes the node even if the parameter requires no gradient now: autograd uses it once it does.
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
  std::vector<autograd::Node*> by_param;  // null: it can have no gradient

  void add(std::shared_ptr<autograd::Node> node, std::unique_ptr<autograd::FunctionPreHook> hook) {
    hooked.emplace_back(node, hook.get());
    node->add_pre_hook(std::move(hook));
  }
};

GradientHooks::GradientHooks(engine::Engine& engine, const ParameterSet& parameters,
                             AutogradPass& pass)
    : nodes_(std::make_unique<Nodes>()) {
  nodes_->receiver->engine = &engine;
  nodes_->receiver->parameters = &parameters;
  nodes_->receiver->pass = &pass;
  nodes_->receiver->place = parameters.place();
  for (int i = 0; i < parameters.size(); ++i) {
    const at::Tensor& variable = parameters.variable(i);
    auto node = variable.is_floating_point() ? accumulator_of(variable) : nullptr;
    autograd::Node* const hooked = node.get();
    nodes_->by_param.push_back(hooked);
    if (hooked != nullptr)
      nodes_->add(std::move(node), std::make_unique<TakeGradient>(nodes_->receiver, i, hooked));
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
  const engine::Weights& weights = nodes_->receiver->engine->weights();
  for (int param = 0; param < weights.param_count(); ++param) {
    if (weights.param(param).group < 0) continue;
    const auto found = chosen->find(nodes_->by_param[static_cast<std::size_t>(param)]);
    if (found != chosen->end() && found->second.needed_) return true;
  }
  return false;
}

void GradientHooks::take(int param, const at::Tensor& gradient) {
  nodes_->receiver->take(param, gradient);
}

GradientHooks::Destination GradientHooks::begin_take(int param) {
  Receiver& receiver = *nodes_->receiver;
  const engine::Weights& weights = receiver.engine->weights();
  receiver.pass->begin();
  receiver.took = true;
  const engine::GradientTarget place = receiver.engine->reducer().begin_add(
      weights.trainable_unit_of(param).id, weights.slot_index_of(param));
  const auto options =
      at::TensorOptions().dtype(to_scalar_type(place.dtype)).device(receiver.place);
  const plan::ParamSpec& spec = weights.param(param);
  const std::vector<std::int64_t> strides = dense_strides(spec.shape, spec.channels_last);
  at::Tensor values = at::for_blob(place.values, spec.shape)
                          .strides(strides)
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

void GradientHooks::begin_pass(double factor) {
  nodes_->receiver->factor = factor;
  nodes_->receiver->took = false;
}

bool GradientHooks::took() const {
  return nodes_->receiver->took;
}

// Takes tensors that were lent to hooks whose node the autograd pass then left out.
void GradientHooks::end_pass() {
  Receiver& receiver = *nodes_->receiver;
  while (!receiver.lent.empty()) receiver.take_lent(receiver.lent.back());
}

void GradientHooks::abandon_pass() noexcept {
  Receiver& receiver = *nodes_->receiver;
  for (const int param : receiver.lent) receiver.grad_of(param).reset();
  receiver.lent.clear();
}

}  // namespace strata::torch

#include "strata/torch/model/gradient_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "strata/base/error.h"
#include "strata/torch/base/dtype.h"

namespace strata::torch {
namespace {

namespace autograd = ::torch::autograd;

// What the hooks of one engine share; cleared when the engine goes.
struct Receiver {
  engine::Engine* engine = nullptr;
};

class TakeGradient final : public autograd::FunctionPreHook {
 public:
  TakeGradient(std::shared_ptr<Receiver> receiver, int param, c10::Device place)
      : receiver_(std::move(receiver)), param_(param), place_(place) {}

  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    engine::Engine* engine = receiver_->engine;
    if (engine == nullptr || gradients.empty() || !gradients[0].defined()) return gradients;
    const std::string& name = engine->weights().param(param_).name;
    if (!engine->in_backward()) {
      throw UsageError(
          fmt::format("a gradient of '{}' arrived outside the engine's backward; call "
                      "engine.backward(loss) instead of "
                      "loss.backward()",
                      name));
    }
    const at::Tensor& gradient = gradients[0];
    if (gradient.layout() != at::kStrided) {
      throw UsageError(fmt::format(
          "the gradient of '{}' is sparse, which cannot be sharded; make the embedding with "
          "sparse=False",
          name));
    }
    // Kept until it is copied; after that the engine has the stream of this thread, on which torch
    // may use the memory again, wait for the copy.
    const DType given = from_scalar_type(gradient.scalar_type());
    const DType dtype = given == DType::kFloat64 ? DType::kFloat32 : given;
    auto dense =
        std::make_shared<const at::Tensor>(gradient.to(place_, to_scalar_type(dtype)).contiguous());
    const auto* values = static_cast<const std::byte*>(dense->const_data_ptr());
    engine->add_gradient(param_, values, dtype, std::move(dense));
    return {at::Tensor()};
  }

 private:
  std::shared_ptr<Receiver> receiver_;
  int param_;
  c10::Device place_;
};

}  // namespace

struct GradientHooks::Nodes {
  std::shared_ptr<Receiver> receiver = std::make_shared<Receiver>();
  std::vector<std::pair<std::shared_ptr<autograd::Node>, autograd::FunctionPreHook*>> hooked;
};

GradientHooks::GradientHooks(engine::Engine& engine, const ParameterSet& parameters)
    : nodes_(std::make_unique<Nodes>()) {
  nodes_->receiver->engine = &engine;
  for (int i = 0; i < parameters.size(); ++i) {
    if (!engine.weights().param(i).trainable) continue;
    auto node = autograd::impl::grad_accumulator(parameters.variable(i));
    auto hook = std::make_unique<TakeGradient>(nodes_->receiver, i, parameters.place());
    nodes_->hooked.emplace_back(node, hook.get());
    node->add_pre_hook(std::move(hook));
  }
}

GradientHooks::~GradientHooks() {
  nodes_->receiver->engine = nullptr;
  for (const auto& [node, hook] : nodes_->hooked) {
    std::erase_if(node->pre_hooks(), [hook = hook](const auto& h) { return h.get() == hook; });
  }
}

}  // namespace strata::torch

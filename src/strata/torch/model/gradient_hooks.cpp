#include "strata/torch/model/gradient_hooks.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>

#include "strata/torch/base/tensors.h"

namespace strata::torch {
namespace {

namespace autograd = ::torch::autograd;

constexpr const char* kDivided = "strata.loss_is_divided";  // a key without a value

// An autograd pass that began at a loss times a loss scale: the graph that runs in the thread of
// the constructor. It is identified by autograd's number for it; passes within it (reentrant
// checkpoints) by the thread that reached the loss. Autograd's threads serve the whole process, so
// the process keeps one list of passes. An object stands in it as long as it lives; the autograd
// pass owns it.
class ScaledPass : NonCopyable {
 public:
  explicit ScaledPass(double scale) : scale_(scale) {
    const std::lock_guard lock(active().mutex);
    active().passes.push_back(this);
  }
  ~ScaledPass() {
    const std::lock_guard lock(active().mutex);
    std::erase(active().passes, this);
  }

  static std::optional<double> scale_here() {
    const std::lock_guard lock(active().mutex);
    const auto& passes = active().passes;
    const auto found = std::find_if(passes.rbegin(), passes.rend(), [](const ScaledPass* pass) {
      return pass->graph_task_ == autograd::get_current_graph_task_id() ||
             pass->thread_ == std::this_thread::get_id();
    });
    return found == passes.rend() ? std::nullopt : std::optional((*found)->scale_);
  }

 private:
  struct Active {
    std::mutex mutex;
    std::vector<const ScaledPass*> passes;  // the latest last
  };
  // Never freed: autograd's threads may outlive static objects.
  static Active& active() {
    static auto* const passes = new Active;
    return *passes;
  }

  double scale_;
  int graph_task_ = autograd::get_current_graph_task_id();
  std::thread::id thread_ = std::this_thread::get_id();
};

void add_producer(const at::Tensor& tensor, std::vector<autograd::Node*>& nodes) {
  autograd::Node* node = tensor.grad_fn().get();
  if (node != nullptr && std::find(nodes.begin(), nodes.end(), node) == nodes.end())
    nodes.push_back(node);
}

// Makes the node even if the parameter requires no gradient now: autograd uses it once it does.
NodePtr accumulator_of(at::Tensor variable) {
  const bool frozen = !variable.requires_grad();
  if (frozen) variable.set_requires_grad(true);
  NodePtr node = autograd::impl::grad_accumulator(variable);
  if (frozen) variable.set_requires_grad(false);
  return node;
}

}  // namespace

std::vector<autograd::Node*> producers(std::span<const at::Tensor> tensors, bool bases) {
  std::vector<autograd::Node*> nodes;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.requires_grad()) add_producer(tensor, nodes);
  }
  for (const at::Tensor& tensor : tensors) {
    if (!bases || !tensor.defined() || !tensor.requires_grad()) continue;
    const auto* view = autograd::impl::get_view_autograd_meta(tensor);
    if (view == nullptr || !view->has_bw_view()) continue;
    add_producer(view->get_backward_view().base_, nodes);
  }
  return nodes;
}

void run_before(autograd::Node& node, bool first, std::function<void()> action) {
  auto& hooks = node.pre_hooks();
  hooks.insert(first ? hooks.begin() : hooks.end(),
               std::make_unique<BeforeNode>(
                   [action = std::move(action)](const BeforeNode::Gradients& gradients) {
                     action();
                     return gradients;
                   }));
}

AutogradPass::AutogradPass(Calls calls)
    : calls_(std::move(calls)), self_(std::make_shared<AutogradPass*>(this)) {}

void AutogradPass::begin() {
  if (driven_ || (open_ && !run_.expired())) return;
  abandon();
  if (!calls_.stores()) return;
  auto here = std::make_shared<Run>();
  autograd::Engine::get_default_engine().queue_callback([self = std::weak_ptr(self_), here] {
    if (const auto pass = self.lock()) (*pass)->end(*here);
  });
  calls_.begin();
  open_ = true;
  run_ = here;
}

void AutogradPass::end(const Run& over) {
  if (!open_ || run_.lock().get() != &over) return;
  try {
    calls_.end();
    open_ = false;
  } catch (...) {
    abandon();
    throw;
  }
}

void AutogradPass::abandon() {
  if (std::exchange(open_, false)) calls_.abandon();
}

void AutogradPass::expect(std::span<const at::Tensor> outputs) {
  for (autograd::Node* node : producers(outputs, /*bases=*/true)) {
    run_before(*node, /*first=*/true, [self = std::weak_ptr(self_)] {
      if (const auto pass = self.lock()) (*pass)->begin();
    });
  }
}

at::Tensor AutogradPass::scaled(const at::Tensor& loss, double factor, double loss_scale) {
  at::Tensor result = loss.to(at::kFloat) * factor;
  run_before(*result.grad_fn(), /*first=*/true, [self = std::weak_ptr(self_), loss_scale] {
    autograd::Engine::get_default_engine().queue_callback(
        [run = std::make_shared<ScaledPass>(loss_scale)] {});  // destroyed with the run
    if (const auto pass = self.lock()) (*pass)->begin();
  });
  return result;
}

void AutogradPass::settle() {
  if (autograd::get_current_graph_task_id() < 0 || run_.expired()) abandon();
}

void AutogradPass::drive(bool driven) {
  using Objects = at::impl::ThreadLocalPythonObjects;
  driven_ = driven;
  if (driven) {
    before_drive_ = Objects::get_state();
    Objects::set(kDivided, nullptr);
  } else if (before_drive_) {
    Objects::set_state(*std::exchange(before_drive_, std::nullopt));
  }
}

bool AutogradPass::divided() {
  return at::impl::ThreadLocalPythonObjects::contains(kDivided);
}

std::optional<double> AutogradPass::scale_here() {
  return ScaledPass::scale_here();
}

// State that the hooks of one engine share.
struct GradientHooks::Receiver {
  engine::Engine* engine = nullptr;  // null once it is destroyed
  const ParameterSet* parameters = nullptr;
  AutogradPass* pass = nullptr;
  double factor = 1.0;
  bool took = false;      // this pass has brought a gradient
  std::vector<int> lent;  // parameters whose `.grad` is lent to the user's hooks
  std::vector<std::pair<NodePtr, autograd::FunctionPreHook*>> hooked;
  std::vector<autograd::Node*> by_param;  // null: it can have no gradient

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
    at::Tensor gradient = given.to(parameters->place());
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
class GradientHooks::TakeLent final : public autograd::FunctionPostHook {
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

GradientHooks::GradientHooks(engine::Engine& engine, const ParameterSet& parameters,
                             AutogradPass& pass)
    : receiver_(std::make_shared<Receiver>()) {
  receiver_->engine = &engine;
  receiver_->parameters = &parameters;
  receiver_->pass = &pass;
  for (int param = 0; param < parameters.size(); ++param) {
    const at::Tensor& variable = parameters.variable(param);
    auto node = variable.is_floating_point() ? accumulator_of(variable) : nullptr;
    receiver_->by_param.push_back(node.get());
    if (node == nullptr) continue;
    auto hook = std::make_unique<BeforeNode>(
        [receiver = receiver_, param, of = node.get(),
         takes_lent = false /* hooks are rare, and cost every pass */](
            const BeforeNode::Gradients& gradients) mutable -> BeforeNode::Gradients {
          if (receiver->engine == nullptr || gradients.empty() || !gradients[0].defined())
            return gradients;
          // Autograd stores the gradient of a parameter in no param group.
          if (receiver->engine->weights().param(param).group < 0) return gradients;
          if (of->tensor_post_acc_grad_hooks() == nullptr) {
            receiver->take(param, gradients[0]);
          } else {
            if (!std::exchange(takes_lent, true))
              of->add_post_hook(std::make_unique<TakeLent>(receiver, param));
            receiver->lend(param, gradients[0]);
          }
          return {at::Tensor()};
        });
    receiver_->hooked.emplace_back(node, hook.get());
    node->add_pre_hook(std::move(hook));
  }
}

GradientHooks::~GradientHooks() {
  receiver_->engine = nullptr;
  for (const auto& [node, hook] : std::exchange(receiver_->hooked, {})) {
    std::erase_if(node->pre_hooks(), [hook = hook](const auto& h) { return h.get() == hook; });
  }
}

bool GradientHooks::stored_by_running_graph() const {
  const auto* chosen = autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return true;  // all leaves are
  const engine::Weights& weights = receiver_->engine->weights();
  for (int param = 0; param < weights.param_count(); ++param) {
    if (weights.param(param).group < 0) continue;
    const auto found = chosen->find(engine::nth(receiver_->by_param, param));
    if (found != chosen->end() && found->second.needed_) return true;
  }
  return false;
}

void GradientHooks::take(int param, const at::Tensor& gradient) {
  receiver_->take(param, gradient);
}

std::tuple<at::Tensor, bool, double> GradientHooks::begin_take(int param) {
  Receiver& receiver = *receiver_;
  const engine::Weights& weights = receiver.engine->weights();
  receiver.pass->begin();
  receiver.took = true;
  const engine::GradientTarget place = receiver.engine->reducer().begin_add(
      weights.trainable_unit_of(param).id, weights.slot_index_of(param));
  const auto options =
      at::TensorOptions().dtype(to_scalar_type(place.dtype)).device(receiver.parameters->place());
  const plan::ParamSpec& spec = weights.param(param);
  const std::vector<std::int64_t> strides = dense_strides(spec.shape, spec.channels_last);
  at::Tensor values = at::for_blob(place.values, spec.shape)
                          .strides(strides)
                          .options(options)
                          .target_device(receiver.parameters->place())
                          .make_tensor();
  return {std::move(values), place.holds, receiver.factor};
}

void GradientHooks::end_take(int param) {
  engine::Engine& engine = *receiver_->engine;
  engine.reducer().end_add(engine.weights().unit_of(param).id,
                           engine.weights().slot_index_of(param));
}

void GradientHooks::begin_pass(double factor) {
  receiver_->factor = factor;
  receiver_->took = false;
}

bool GradientHooks::took() const {
  return receiver_->took;
}

// Takes tensors that were lent to hooks whose node the autograd pass then left out.
void GradientHooks::end_pass() {
  Receiver& receiver = *receiver_;
  while (!receiver.lent.empty()) receiver.take_lent(receiver.lent.back());
}

void GradientHooks::abandon_pass() noexcept {
  Receiver& receiver = *receiver_;
  for (const int param : receiver.lent) receiver.grad_of(param).reset();
  receiver.lent.clear();
}

}  // namespace strata::torch

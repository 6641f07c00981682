// The way into autograd: AutogradPass finds the backward passes that a script starts, GradientHooks
// takes the gradients where autograd would store them. Threads, ownership, errors: at each class.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "strata/engine/engine.h"
#include "strata/torch/base/tensors.h"
#include "strata/torch/model/parameter_set.h"

namespace strata::torch {

namespace autograd = ::torch::autograd;

inline void add_producer(const at::Tensor& tensor, std::vector<autograd::Node*>& nodes) {
  autograd::Node* node = tensor.grad_fn().get();
  if (node != nullptr && std::find(nodes.begin(), nodes.end(), node) == nodes.end())
    nodes.push_back(node);
}

// The nodes that made the tensors, each once; with `bases` then also the nodes of their bases if
// the tensors are views. An in-place change of a view (such as the output of a linear layer)
// removes the view's own node from the graph, but not its base's.
inline std::vector<autograd::Node*> producers(std::span<const at::Tensor> tensors, bool bases) {
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

// A hook of a node: gets the gradients of a node that is about to run, and returns those that it
// runs with.
class BeforeNode final : public autograd::FunctionPreHook {
 public:
  using Gradients = std::vector<at::Tensor>;
  explicit BeforeNode(std::function<Gradients(const Gradients&)> action)
      : action_(std::move(action)) {}
  Gradients operator()(const Gradients& gradients) override { return action_(gradients); }

 private:
  std::function<Gradients(const Gradients&)> action_;
};

// Runs `action` when the node is about to run. `first`: before the actions that are already
// registered there, else after them.
inline void run_before(autograd::Node& node, bool first, std::function<void()> action) {
  auto& hooks = node.pre_hooks();
  hooks.insert(first ? hooks.begin() : hooks.end(),
               std::make_unique<BeforeNode>(
                   [action = std::move(action)](const BeforeNode::Gradients& gradients) {
                     action();
                     return gradients;
                   }));
}

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

// Finds the beginning and the end of a backward pass that the script starts by `loss.backward()`,
// without a call of the engine.
//
// The pass begins when the first of these runs: a node that made an output of a forward (expect()),
// the node of a scaled loss (scaled()), or the node that stores a parameter's gradient (begin()).
// It ends with the autograd pass in which it began, in autograd's final callback, or, if an error
// ended that one, when the next one begins or by settle(). Nested autograd passes belong to it:
// those of reentrant checkpoints, and of functions that differentiate in their own backward. An
// autograd pass that stores no gradient of the model (torch.autograd.grad) is no backward pass.
//
// While engine.backward() runs, which begins and ends the pass itself (drive()), this class finds
// nothing.
//
// Threads: one thread at a time, autograd's threads among them. Ownership: hooks in graphs hold it
// weakly; graphs that outlive it do nothing to it. Errors: those of the calls it makes, thrown out
// of backward.
class AutogradPass : NonCopyable {
 public:
  struct Calls {
    std::function<bool()> stores;  // whether the graph that runs stores our gradients
    std::function<void()> begin;
    std::function<void()> end;      // abandon() follows if it throws
    std::function<void()> abandon;  // throws nothing
  };
  explicit AutogradPass(Calls calls)
      : calls_(std::move(calls)), self_(std::make_shared<AutogradPass*>(this)) {}

  void expect(std::span<const at::Tensor> outputs) {
    for (autograd::Node* node : producers(outputs, /*bases=*/true)) {
      run_before(*node, /*first=*/true, [self = std::weak_ptr(self_)] {
        if (const auto pass = self.lock()) (*pass)->begin();
      });
    }
  }
  // Returns `loss`, which must require a gradient, times `factor`. An autograd pass from there
  // counts as one of a loss scaled by `loss_scale` (scale_here()), for other models, too.
  at::Tensor scaled(const at::Tensor& loss, double factor, double loss_scale) {
    at::Tensor result = loss.to(at::kFloat) * factor;
    run_before(*result.grad_fn(), /*first=*/true, [self = std::weak_ptr(self_), loss_scale] {
      autograd::Engine::get_default_engine().queue_callback(
          [run = std::make_shared<ScaledPass>(loss_scale)] {});  // destroyed with the run
      if (const auto pass = self.lock()) (*pass)->begin();
    });
    return result;
  }
  // Called from within autograd: begins the pass unless it runs already.
  void begin() {
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
  // Abandons a pass that an error has ended. Called before any other use of the engine.
  void settle() {
    if (autograd::get_current_graph_task_id() < 0 || run_.expired()) abandon();
  }

  // drive(true) lasts until the same thread calls drive(false). Meanwhile every loss counts as
  // divided (divided()), for other models, too.
  void drive(bool driven) {
    using Objects = at::impl::ThreadLocalPythonObjects;
    driven_ = driven;
    if (driven) {
      before_drive_ = Objects::get_state();
      Objects::set(kDivided, nullptr);
    } else if (before_drive_) {
      Objects::set_state(*std::exchange(before_drive_, std::nullopt));
    }
  }
  // Whether the graph that runs in this thread began at a loss that engine.backward() of any engine
  // has divided by its accumulation steps. Autograd carries this from thread to thread.
  static bool divided() { return at::impl::ThreadLocalPythonObjects::contains(kDivided); }
  // The loss scale by which an engine of this process has multiplied the loss at which that graph
  // began; nullopt: none has. Other engines, whose parameters the pass reaches, convert their
  // gradients to their own scale.
  static std::optional<double> scale_here() { return ScaledPass::scale_here(); }

 private:
  // One autograd pass. Its callback owns this object, and autograd destroys the callback however
  // the pass ends.
  struct Run {};
  void end(const Run& over) {
    if (!open_ || run_.lock().get() != &over) return;
    try {
      calls_.end();
      open_ = false;
    } catch (...) {
      abandon();
      throw;
    }
  }
  void abandon() {
    if (std::exchange(open_, false)) calls_.abandon();
  }

  static constexpr const char* kDivided = "strata.loss_is_divided";  // a key without a value

  Calls calls_;
  bool driven_ = false;
  bool open_ = false;
  std::weak_ptr<Run> run_;               // in which the open pass began
  std::shared_ptr<AutogradPass*> self_;  // hooks hold it weakly
  std::optional<at::impl::ThreadLocalPythonObjects> before_drive_;
};

// Takes gradients where autograd would store them. A pre-hook on each trainable parameter's
// AccumulateGrad node hands the gradient to the engine and gives autograd nothing, so autograd
// makes no `.grad`. Users' hooks see the same as in torch. Tensor hooks run before. For
// post-accumulate hooks `.grad` is this pass's gradient on this rank, divided and scaled as it will
// count; when they have run, the engine takes the tensor that they leave there. The first gradient
// of a backward pass begins the pass, unless it runs already (AutogradPass).
//
// Frozen parameters have a hook, too: FrozenParameters makes room for a gradient when one comes.
// For a parameter that requires gradients but is in no param group, autograd stores `.grad` as
// usual.
//
// Threads: the hooks run in autograd's threads, one at a time for one device. Ownership:
// keeps the AccumulateGrad nodes alive (a tensor holds its node weakly); the hooks hold the
// receiver weakly through a shared switch, and do nothing once this object is gone.
// A sparse gradient is made dense; a warning says so once in a process.
// Errors: UsageError, thrown out of backward, for frozen parameters that cannot be trained (tiles).
class GradientHooks : NonCopyable {
 public:
  // Parameters must be at their full shape (ParameterSet::bind).
  GradientHooks(engine::Engine& engine, const ParameterSet& parameters, AutogradPass& pass)
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
  ~GradientHooks() {
    receiver_->engine = nullptr;
    for (const auto& [node, hook] : std::exchange(receiver_->hooked, {}))
      std::erase_if(node->pre_hooks(), [hook = hook](const auto& h) { return h.get() == hook; });
  }

  // Whether the graph that runs in this thread stores a gradient of a trainable parameter, as far
  // as autograd knows it beforehand.
  bool stored_by_running_graph() const {
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
  // Takes a gradient that autograd does not store: a tile's, from the operation that used it.
  void take(int param, const at::Tensor& gradient) { receiver_->take(param, gradient); }
  // Used in place of take() for a tile: the operation writes its gradient into the tensor, which
  // has the parameter's shape, or adds it there (true), times the factor. end_take() follows.
  std::tuple<at::Tensor, bool, double> begin_take(int param) {
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
  void end_take(int param) {
    engine::Engine& engine = *receiver_->engine;
    engine.reducer().end_add(engine.weights().unit_of(param).id,
                             engine.weights().slot_index_of(param));
  }
  // begin_pass(): a pass begins, whose gradients are multiplied by `factor`. took(): it has brought
  // some. end_pass(), abandon_pass(): it has ended, or has failed.
  void begin_pass(double factor) {
    receiver_->factor = factor;
    receiver_->took = false;
  }
  bool took() const { return receiver_->took; }
  // Takes tensors that were lent to hooks whose node the autograd pass then left out.
  void end_pass() {
    Receiver& receiver = *receiver_;
    while (!receiver.lent.empty()) receiver.take_lent(receiver.lent.back());
  }
  void abandon_pass() noexcept {
    Receiver& receiver = *receiver_;
    for (const int param : receiver.lent) receiver.grad_of(param).reset();
    receiver.lent.clear();
  }

 private:
  // State that the hooks of one engine share.
  struct Receiver {
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
      // The gradient is kept until it is copied. Then the engine makes this thread's stream, on
      // which torch may reuse the memory, wait for the copy.
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

  // Makes the node even if the parameter requires no gradient now: autograd uses it once it does.
  static NodePtr accumulator_of(at::Tensor variable) {
    const bool frozen = !variable.requires_grad();
    if (frozen) variable.set_requires_grad(true);
    NodePtr node = autograd::impl::grad_accumulator(variable);
    if (frozen) variable.set_requires_grad(false);
    return node;
  }

  std::shared_ptr<Receiver> receiver_;
};

}  // namespace strata::torch

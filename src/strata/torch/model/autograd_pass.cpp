#include "strata/torch/model/autograd_pass.h"

#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>

namespace strata::torch {
namespace {

namespace autograd = ::torch::autograd;

constexpr const char* kDivided = "strata.loss_is_divided";  // a key without a value

// An autograd pass that began at a loss times a loss scale: the graph that runs in the thread of
// the constructor. It is identified by autograd's number for it; passes within it (reentrant
// checkpoints) by the thread that reached the loss. Autograd's threads serve the whole process, so
// the process keeps one list of passes. An object stands in it as long as it lives; the autograd
// pass owns it.
class ScaledPass {
 public:
  explicit ScaledPass(double scale) : scale_(scale) {
    const std::lock_guard lock(active().mutex);
    active().passes.push_back(this);
  }
  ~ScaledPass() {
    const std::lock_guard lock(active().mutex);
    std::erase(active().passes, this);
  }
  ScaledPass(const ScaledPass&) = delete;
  ScaledPass& operator=(const ScaledPass&) = delete;

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

// Runs a function when a node is about to run; passes gradients through.
class BeforeNode final : public autograd::FunctionPreHook {
 public:
  explicit BeforeNode(std::function<void()> action) : action_(std::move(action)) {}
  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    action_();
    return gradients;
  }

 private:
  std::function<void()> action_;
};

void add_producer(const at::Tensor& tensor, std::vector<autograd::Node*>& nodes) {
  autograd::Node* node = tensor.grad_fn().get();
  if (node != nullptr && std::find(nodes.begin(), nodes.end(), node) == nodes.end())
    nodes.push_back(node);
}

}  // namespace

std::vector<autograd::Node*> producers(std::span<const at::Tensor> tensors) {
  std::vector<autograd::Node*> nodes;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.requires_grad()) add_producer(tensor, nodes);
  }
  return nodes;
}

std::vector<autograd::Node*> producers_of_bases(std::span<const at::Tensor> tensors) {
  std::vector<autograd::Node*> nodes;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    const auto* view = autograd::impl::get_view_autograd_meta(tensor);
    if (view == nullptr || !view->has_bw_view()) continue;
    add_producer(view->get_backward_view().base_, nodes);
  }
  return nodes;
}

void run_before(autograd::Node& node, bool first, std::function<void()> action) {
  auto& hooks = node.pre_hooks();
  hooks.insert(first ? hooks.begin() : hooks.end(),
               std::make_unique<BeforeNode>(std::move(action)));
}

struct AutogradPass::State : std::enable_shared_from_this<AutogradPass::State> {
  // One autograd pass. Its callback owns this object, and autograd destroys the callback however
  // the pass ends.
  struct Run {};

  Calls calls;  // empty once the owner is gone
  bool driven = false;
  bool open = false;
  std::weak_ptr<Run> run;  // in which the open pass began

  void begin() {
    if (driven || !calls.begin) return;
    if (open && !run.expired()) return;
    abandon();
    if (!calls.stores()) return;
    auto here = std::make_shared<Run>();
    autograd::Engine::get_default_engine().queue_callback([state = weak_from_this(), here] {
      if (const auto s = state.lock()) s->end(*here);
    });
    calls.begin();
    open = true;
    run = here;
  }
  void end(const Run& over) {
    if (!open || run.lock().get() != &over) return;
    try {
      calls.end();
      open = false;
    } catch (...) {
      abandon();
      throw;
    }
  }
  void abandon() {
    if (std::exchange(open, false)) calls.abandon();
  }
};

AutogradPass::AutogradPass(Calls calls) : state_(std::make_shared<State>()) {
  state_->calls = std::move(calls);
}

AutogradPass::~AutogradPass() {
  state_->calls = {};
  state_->open = false;
}

void AutogradPass::expect(std::span<const at::Tensor> outputs) {
  std::vector<autograd::Node*> nodes = producers(outputs);
  for (autograd::Node* node : producers_of_bases(outputs)) nodes.push_back(node);
  for (autograd::Node* node : nodes) {
    run_before(*node, /*first=*/true, [state = std::weak_ptr(state_)] {
      if (const auto s = state.lock()) s->begin();
    });
  }
}

at::Tensor AutogradPass::scaled(const at::Tensor& loss, double factor, double loss_scale) {
  at::Tensor result = loss.to(at::kFloat) * factor;
  run_before(*result.grad_fn(), /*first=*/true, [state = std::weak_ptr(state_), loss_scale] {
    autograd::Engine::get_default_engine().queue_callback(
        [run = std::make_shared<ScaledPass>(loss_scale)] {});  // destroyed with the run
    if (const auto s = state.lock()) s->begin();
  });
  return result;
}

void AutogradPass::begin() {
  state_->begin();
}

void AutogradPass::settle() {
  if (autograd::get_current_graph_task_id() < 0 || state_->run.expired()) state_->abandon();
}

void AutogradPass::drive(bool driven) {
  using Objects = at::impl::ThreadLocalPythonObjects;
  state_->driven = driven;
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

}  // namespace strata::torch

// ScopedCall: a C++ model calls its parts through it, so that their parameters are gathered. The
// model's forward says `call(*block, x)` instead of `block->forward(x)`, and `call.read(weight)`
// for a parameter that no such call covers (a tied embedding). A ScopedCall without a trainer only
// calls forward, so the same model runs without the engine.
//
// A call gathers the parameters of the module and of all modules below it, runs forward, and
// releases them. The backward pass gathers them again by itself. Calls nest. If input or output
// tensors are hidden in types that collect_tensors() does not know, the scope lasts until the
// backward pass ends.
//
// Threads: one thread at a time. Ownership: weak; without the trainer it only calls forward.
// Errors: UsageError for a module that is no part of the trained model; those of gathering.
#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "strata/torch/sharded/sharded_model.h"

namespace strata::torch {

// A torch::nn::Module as the engine sees it: its parameters by name, each once, and its tree of
// modules. Class names are as a configuration spells them: without namespace and without the "Impl"
// of libtorch's module holders ("Block" for my::BlockImpl). Shares the module's tensors and borrows
// its modules.
struct ModuleDescription {
  ModelInput input;
  std::vector<const ::torch::nn::Module*> modules;  // by index into input.tree
};

// `groups`: the optimizer's param group of a parameter; absent: group 0.
ModuleDescription describe_module(
    const ::torch::nn::Module& root,
    const std::unordered_map<const c10::TensorImpl*, int>& groups = {});

template <typename T>
inline constexpr bool kIsOptional = false;
template <typename T>
inline constexpr bool kIsOptional<std::optional<T>> = true;

// Finds the tensors in the arguments and results of forward: tensors, and optionals, pairs, tuples,
// vectors, arrays and maps of them. Values of other types hold none.
template <typename T>
void collect_tensors(const T& value, std::vector<at::Tensor>& tensors) {
  if constexpr (std::is_convertible_v<const T&, const at::TensorBase&>) {
    tensors.emplace_back(value);
  } else if constexpr (kIsOptional<T>) {
    if (value.has_value()) collect_tensors(*value, tensors);
  } else if constexpr (requires {
                         std::begin(value);
                         std::end(value);
                       }) {
    // A range of itself (std::filesystem::path) would not end.
    if constexpr (!std::is_same_v<std::decay_t<decltype(*std::begin(value))>, T>) {
      for (const auto& element : value) collect_tensors(element, tensors);
    }
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&](const auto&... elements) { (collect_tensors(elements, tensors), ...); }, value);
  }
}

// The scopes of a model's modules. Made by the trainer.
class ModuleScopes {
 public:
  ModuleScopes(std::shared_ptr<ShardedModel> model, const ModuleDescription& description);

  ShardedModel& model() const { return *model_; }
  // Scopes of the module and of all below it. UsageError for a module of another model.
  std::span<const int> below(const ::torch::nn::Module& module) const;
  // The root's own scope, or none.
  std::span<const int> of_root() const { return of_root_; }

 private:
  std::shared_ptr<ShardedModel> model_;
  std::unordered_map<const ::torch::nn::Module*, std::vector<int>> below_;
  std::vector<int> of_root_;
};

// Scopes that are entered: abandoned by the destructor unless leave() was called.
class EnteredScopes : NonCopyable {
 public:
  EnteredScopes(ShardedModel& model, std::span<const int> scopes);
  ~EnteredScopes();

  void leave(std::span<const at::Tensor> inputs, std::span<const at::Tensor> outputs);

 private:
  ShardedModel& model_;
  std::span<const int> scopes_;
  std::size_t entered_ = 0;
};

// The forward of the whole model, from its beginning to leave(), or to the end of this object.
class RootCall : NonCopyable {
 public:
  explicit RootCall(ShardedModel& model) : model_(model), autocast_(model) {
    model.begin_forward();
    model.enter_root();
  }
  ~RootCall() {
    if (!left_) model_.leave_root({});
  }

  template <typename Result>
  void leave(const Result& result) {
    std::vector<at::Tensor> outputs;
    if (at::GradMode::is_enabled()) collect_tensors(result, outputs);
    left_ = true;
    model_.leave_root(outputs);
  }

 private:
  ShardedModel& model_;
  AutocastGuard autocast_;
  bool left_ = false;
};

// Runs module.forward(args...) within the scopes.
template <typename Module, typename... Args>
auto run_within(ShardedModel& model, std::span<const int> scopes, Module& module, Args&&... args) {
  static_assert(!std::is_void_v<decltype(module.forward(std::forward<Args>(args)...))>,
                "forward must return what backward starts from");
  if (scopes.empty()) return module.forward(std::forward<Args>(args)...);
  EnteredScopes entered(model, scopes);
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  const bool records = at::GradMode::is_enabled();
  if (records) (collect_tensors(args, inputs), ...);
  auto result = module.forward(std::forward<Args>(args)...);
  if (records) collect_tensors(result, outputs);
  entered.leave(inputs, outputs);
  return result;
}

class ScopedCall {
 public:
  ScopedCall() = default;
  explicit ScopedCall(std::weak_ptr<const ModuleScopes> scopes) : scopes_(std::move(scopes)) {}

  template <typename Module, typename... Args>
  auto operator()(Module& module, Args&&... args) const {
    const std::shared_ptr<const ModuleScopes> scopes = scopes_.lock();
    if (scopes == nullptr || !scopes->model().alive())
      return module.forward(std::forward<Args>(args)...);
    return run_within(scopes->model(), scopes->below(module), module, std::forward<Args>(args)...);
  }

  // Returns the parameter, gathered until the backward pass ends; without autograd, until the next
  // forward or step. Returns other tensors unchanged.
  const at::Tensor& read(const at::Tensor& parameter) const;

 private:
  std::weak_ptr<const ModuleScopes> scopes_;
};

}  // namespace strata::torch

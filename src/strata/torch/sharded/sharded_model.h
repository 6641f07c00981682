// A torch model under the engine: planning, adoption of its values, interception of its passes, and
// the training calls. The Python face and the C++ face are both built on it; it knows no Python. It
// is a facade over the start (start/model_start.h), the passes (model/training_passes.h) and the
// values (model/value_access.h), and decides the order of calls and of destruction.
//
// Construction (collective) plans units, makes the engine, takes the values of every parameter that
// has some (rank 0's values win: other ranks receive the differences), and from then on owns the
// parameters' memory. destroy() gives the parameters ordinary memory back, with values if the stage
// keeps them whole or the caller asks for it, and removes every hook.
//
// Threads: one thread at a time, autograd's threads while the caller waits for backward. Another
// thread may read parameters beside it (ValueAccess says which and when), but not while the model
// is destroyed.
// Errors: ConfigError, UsageError, CommError, OutOfMemoryError, NumericsError; after destroy()
// every call throws UsageError.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "strata/engine/config/config.h"
#include "strata/engine/engine.h"
#include "strata/engine/optimize/external_optimizer.h"
#include "strata/engine/step_control.h"
#include "strata/forecast/memory_forecast.h"
#include "strata/torch/model/model_plan.h"
#include "strata/torch/model/parameter_set.h"
#include "strata/torch/model/training_passes.h"
#include "strata/torch/model/value_access.h"

namespace strata::torch {

class ShardedModel final : public ParameterOwner {
 public:
  // `name` distinguishes the engines of one process in shared memory; the same on every rank.
  // `config.batch` must be complete. `rule` kNone: for evaluation only.
  ShardedModel(const ModelInput& input, const engine::Config& config, engine::UpdateRule rule,
               ModelRuntime runtime, std::string name);
  ~ShardedModel() override;
  ShardedModel(const ShardedModel&) = delete;
  ShardedModel& operator=(const ShardedModel&) = delete;

  // --- scopes: ids are indices into plan().scopes ---
  const plan::ModelPlan& plan() const { return model_.plan; }
  TrainingPasses& passes();
  Scopes& scopes() { return passes().scopes(); }
  void begin_forward();
  void enter_root();
  void leave_root(std::span<const at::Tensor> outputs);

  // --- training: TrainingPasses says what they do ---
  engine::StepControl& control() { return passes().control(); }
  void begin_backward();
  void end_backward();
  void abandon_backward() noexcept;
  at::Tensor scale(const at::Tensor& loss);
  at::Tensor factored(const at::Tensor& loss, bool by_accumulation);
  GradientHooks& gradients() { return passes().gradients(); }
  std::optional<engine::StepResult> step(std::span<const engine::GroupScalars> groups);
  // Collective, between passes (engine::StateOffload). Parameters of offloaded weights are empty.
  bool offload_states(const engine::StateSet& states, bool pinned);
  void reload_states();

  // --- values: ValueAccess says what they do ---
  ValueAccess& values();
  void gather(std::span<const int> params);
  void release(std::span<const int> params, bool discard);
  bool read(int param);
  bool gathered(int param) const;
  bool replaced(int param) const { return parameters_.replaced(param); }
  void put_back(std::span<const int> params);
  // A parameter's index, by tensor identity; -1 for tensors that are not parameters of this model.
  int index_of(const at::Tensor& variable) const { return parameters_.index_of(variable); }
  std::pair<Numel, Numel> owned_range(int param) const override;
  bool channels_last(int param) const override {
    return model_.specs[static_cast<std::size_t>(param)].channels_last;
  }
  void lend_values(int param, const Borrowing& borrowing) override;

  engine::Engine& engine();
  const engine::Config& config() const { return config_; }
  ParameterSet& parameters() { return parameters_; }
  c10::Device place() const { return runtime_.place; }
  int threads() const { return runtime_.threads; }  // that work on host memory
  memory::Ledger& ledger() { return *runtime_.device->ledger(); }
  // The ledger's values after this model has been trained for some steps.
  forecast::MemoryForecast memory_forecast();
  // The bytes that a rank may hold; all ranks agree on them if placement is automatic.
  const forecast::Room& room() const { return room_; }
  const std::vector<plan::ParamSpec>& specs() const { return model_.specs; }
  // Collective, so that no peer still reads memory that is freed. Whole parameters get memory of
  // their own, unless there is too little. Sharded ones get it with `keep_values`, and are empty
  // without.
  void destroy(bool keep_values);
  void retire() override;
  void unmap_freed() override { runtime_.collectives->unmap_freed(); }
  // Collective: returns when every rank has called it. For the end of a program, since a rank that
  // leaves while another still gathers would look like one that died.
  void wait_for_all();
  bool alive() const { return engine_ != nullptr; }
  // Frees the parameters' former memory in a thread of its own, once the model is set up; during
  // the set-up the system often locks all of the process's memory.
  void free_originals();

 private:
  void require_alive() const;
  std::vector<at::Tensor> own_copies(bool of_sharded);
  void let_go(std::span<const at::Tensor> full);

  engine::Config config_;
  ModelRuntime runtime_;
  forecast::Room room_;
  PlannedModel model_;
  engine::UpdateRule rule_;
  ParameterSet parameters_;
  std::unique_ptr<engine::Engine> engine_;  // null: destroyed; the two below are null as well
  std::unique_ptr<TrainingPasses> passes_;
  std::unique_ptr<ValueAccess> values_;
  std::vector<at::Tensor> originals_;  // the parameters' former values, until they are freed
  std::jthread freeing_;
};

}  // namespace strata::torch

// A torch model under the engine, for the Python face and the C++ face; it knows no Python. It is a
// facade over the start (start/model_start.h), the passes (model/training_passes.h) and the values
// (model/value_access.h), and decides the order of calls and of destruction. Construction
// (collective) plans units, starts the model, and from then on owns the parameters' memory.
// destroy() gives it back and removes every hook.
//
// Threads: one thread at a time, autograd's threads while the caller waits for backward. Another
// thread may read parameters (ValueAccess), but not while the model is destroyed.
// Errors: ConfigError, UsageError, CommError, OutOfMemoryError, NumericsError; after destroy()
// every call throws UsageError.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "strata/base/error.h"
#include "strata/engine/checkpoint/shard_states.h"
#include "strata/engine/optimize/external_optimizer.h"
#include "strata/torch/model/training_passes.h"
#include "strata/torch/model/value_access.h"
#include "strata/torch/sharded/host_codes.h"

namespace strata::torch {

class ShardedModel final : public ParameterOwner {
 public:
  // `name` distinguishes the engines of one process in shared memory; the same on every rank.
  // `config.batch` must be complete. `rule` kNone: for evaluation only.
  ShardedModel(const ModelInput& input, const engine::Config& config, engine::UpdateRule rule,
               ModelRuntime runtime, std::string name);
  ~ShardedModel() override;

  // --- scopes: ids are indices into plan().scopes ---
  const plan::ModelPlan& plan() const { return model_.plan; }
  TrainingPasses& passes() { return alive_part(passes_); }
  Scopes& scopes() { return passes().scopes(); }
  void begin_forward();
  void enter_root();
  void leave_root(std::span<const at::Tensor> outputs) {
    if (alive()) passes_->leave_root(outputs);
  }

  // --- training: TrainingPasses says what they do ---
  engine::StepControl& control() { return passes().control(); }
  void begin_backward(std::span<const engine::GroupScalars> groups = {});
  void end_backward() { passes().end_backward(); }
  void abandon_backward() noexcept {
    if (alive()) passes_->abandon_backward();
  }
  at::Tensor scale(const at::Tensor& loss) { return passes().scale(loss); }
  at::Tensor factored(const at::Tensor& loss, bool by_accumulation) {
    return passes().factored(loss, by_accumulation);
  }
  std::optional<engine::StepResult> step(std::span<const engine::GroupScalars> groups);
  // Collective, between passes (engine::StateOffload). Parameters of offloaded weights are empty.
  bool offload_states(const engine::StateSet& states, bool pinned);
  void reload_states();

  // --- values: ValueAccess says what they do ---
  ValueAccess& values() { return alive_part(values_); }
  void gather(std::span<const int> params) { values().gather(params); }
  void release(std::span<const int> params, bool discard) {
    if (alive()) values_->release(params, discard);
  }
  bool read(int param) { return alive() && values_->read(param); }
  bool replaced(int param) const { return parameters_.replaced(param); }
  // A parameter's index, by tensor identity; -1 for tensors that are not parameters of this model.
  int index_of(const at::Tensor& variable) const { return parameters_.index_of(variable); }
  std::pair<Numel, Numel> owned_range(int param) const override {
    return alive_part(engine_).weights().owned_range(param);
  }
  bool channels_last(int param) const override {
    return engine::nth(model_.specs, param).channels_last;
  }
  void lend_values(int param, const Borrowing& borrowing) override;

  engine::Engine& engine() { return alive_part(engine_); }
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
  // their own, unless there is too little; sharded ones with `keep_values` alone, else they are
  // empty.
  void destroy(bool keep_values);
  void retire() override;
  void unmap_freed() override { runtime_.collectives->unmap_freed(); }
  // Collective: returns when every rank has called it. For the end of a program: a rank that leaves
  // while another still gathers would look like one that died.
  void wait_for_all();
  bool alive() const { return engine_ != nullptr; }
  // Frees the parameters' former memory in a thread of its own, once the model is set up: during
  // the set-up the system often locks all of the process's memory.
  void free_originals();

 private:
  template <typename Part>
  Part& alive_part(const std::unique_ptr<Part>& part) const {
    if (part) return *part;
    throw UsageError("the engine was destroyed; call initialize() again to go on with this model");
  }
  std::vector<at::Tensor> own_copies(bool of_sharded);
  void let_go(std::span<const at::Tensor> full);

  engine::Config config_;
  ModelRuntime runtime_;
  forecast::Room room_;
  PlannedModel model_;
  engine::UpdateRule rule_;
  ParameterSet parameters_;
  std::unique_ptr<engine::Engine> engine_;  // null: destroyed; the three below are null as well
  std::shared_ptr<void> on_growth_;
  std::unique_ptr<TrainingPasses> passes_;
  std::unique_ptr<ValueAccess> values_;
  std::vector<at::Tensor> originals_;  // the parameters' former values, until they are freed
  std::jthread freeing_;
};

// torch.autocast for the lifetime of this object, as the model's configuration says. Casts of
// weights are not cached for later operations: at stage 3 the cache would be a whole copy of the
// model, and the stages would differ in bits where an operation uses a weight again. Threads: the
// state belongs to the thread that made the object.
class AutocastGuard : NonCopyable {
 public:
  explicit AutocastGuard(const ShardedModel& model);
  ~AutocastGuard();

 private:
  c10::DeviceType type_;
  std::optional<at::ScalarType> dtype_before_;  // nullopt: the configuration has no autocast
  bool was_enabled_ = false;
  bool kept_casts_ = true;
};

// Kinds of states; the others are those of the engine's Adam (engine::kExpAvg, kExpAvgSq).
inline constexpr std::string_view kMaster = "master";  // of a trainable parameter
// From the first reduction to the end of the step; times the loss scale under fp16.
inline constexpr std::string_view kGradient = "gradient";

// The training states of one parameter as tensors: the fp32 master weights, the reduced gradient of
// the step so far, Adam's moments. Each rank has its own part of them, a range of the parameter's
// elements; a whole state is joined from all ranks' parts. Scripts inspect and edit states between
// steps with it, and every call waits for the device. Threads: the one that trains. Ownership:
// returns copies; borrows the model. Values are fp32, of one dimension, on the model's device.
// Errors: UsageError.
class StateValues {
 public:
  StateValues(ShardedModel& model, int param);

  // Elements [first, second) of the parameter are this rank's part.
  std::pair<std::int64_t, std::int64_t> range() const;
  // Copies; nullopt if there is no such state, which holds on all ranks or on none. whole() is
  // collective.
  std::optional<at::Tensor> part(std::string_view kind);
  std::optional<at::Tensor> whole(std::string_view kind);
  // Codes and scales of a state in 8 bits, on the host; nullopt where there is no such state.
  std::optional<HostCodes> codes(std::string_view state);
  // Joins a state that the caller keeps: `mine` is this rank's part. Collective; nullopt if a rank
  // lacks its part.
  std::optional<at::Tensor> joined(const std::optional<at::Tensor>& mine);
  // Gives every rank the whole state that one of them keeps, in fp32; the others pass nothing.
  // Collective; nullopt if none has it.
  std::optional<at::Tensor> of_owner(const std::optional<at::Tensor>& mine);
  // Collective for masters, because the weights are updated from them. Returns false and does
  // nothing if there is no such state.
  bool set_part(std::string_view kind, const at::Tensor& values);
  bool set_whole(std::string_view kind, const at::Tensor& values);

 private:
  at::Tensor join(const at::Tensor& mine);
  // States that the engine keeps in 8 bits, as numbers on the host, and back.
  HostCodes read_codes(engine::ShardStates& states, std::string_view state);
  at::Tensor decoded(engine::ShardStates& states, std::string_view state);
  void encode(engine::ShardStates& states, std::string_view state, const at::Tensor& values);
  void set_masters(const at::Tensor& values);
  void finish_queued();

  ShardedModel& model_;
  engine::Engine& engine_;
  int param_;
  const engine::Unit& unit_;
  std::pair<Numel, Numel> mine_;  // this rank's elements of the parameter
  Numel at_;                      // where they begin in its shard
};

}  // namespace strata::torch

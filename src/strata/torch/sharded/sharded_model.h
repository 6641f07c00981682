// A torch model under the engine: planning, adoption of its values, interception of its passes, and
// the training calls. What the Python face and the C++ face both stand on; knows no Python.
//
// Construction (collective) plans units, makes the engine, takes the values of every parameter that
// has some (rank 0's count: others receive what differs), and from then on owns the parameters'
// memory. A construction that fails leaves the parameters their values, unless their memory had to
// be given up for the engine's (the error says so). destroy() gives the parameters ordinary memory
// back, full where the stage keeps them whole or the caller asks for it, and takes every hook away.
//
// Threads: one thread at a time, autograd's threads while the caller waits for backward.
// Errors: ConfigError, UsageError, CommError, OutOfMemoryError, NumericsError; after destroy()
// every call throws UsageError.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/device/device.h"
#include "strata/engine/config/config.h"
#include "strata/engine/engine.h"
#include "strata/engine/optimize/external_optimizer.h"
#include "strata/engine/step_control.h"
#include "strata/forecast/memory_forecast.h"
#include "strata/plan/module_tree.h"
#include "strata/torch/model/gradient_hooks.h"
#include "strata/torch/model/parameter_set.h"
#include "strata/torch/model/scopes.h"

namespace strata::torch {

class OriginalValues;
class ShardedModel;

// One parameter of the user's model.
struct ModelParameter {
  std::string name;
  at::Tensor variable;              // the user's tensor object
  std::vector<std::int64_t> shape;  // full
  bool has_values = true;           // false: born flat, values come from files
  int group = 0;                    // of the optimizer
  // Another model that has sharded this parameter already, and its index there: its values are
  // taken over shard by shard, and it is destroyed when all are.
  std::shared_ptr<ShardedModel> owner;
  int owner_index = 0;

  // Not from files, and not from another model.
  bool has_own_values() const { return has_values && owner == nullptr; }
};

struct ModelInput {
  std::vector<ModelParameter> parameters;
  plan::ModuleTree tree;
};

// What a model runs on. `collectives` carry memory of `device`, which is the engine's view of
// `place`; null until the ranks are connected.
struct ModelRuntime {
  c10::Device place{c10::DeviceType::CPU};
  std::shared_ptr<comm::Collectives> collectives;
  std::shared_ptr<device::Device> device;
  std::shared_ptr<offload::StateStore> states;
  engine::InitReport::Progress progress{};  // of start-up; may be empty
  int threads = 1;                          // that work on host memory
};

// `threads`: that work on host memory (host_threads.h).
ModelRuntime make_runtime(c10::Device place, int threads,
                          std::shared_ptr<comm::Collectives> collectives = nullptr);

class ShardedModel {
 public:
  // `name` tells the engines of one process apart in shared memory; the same on every rank.
  // `config.batch` must be complete. `rule` kNone: for evaluation only.
  ShardedModel(const ModelInput& input, const engine::Config& config, engine::UpdateRule rule,
               ModelRuntime runtime, std::string name);
  ~ShardedModel();

  // --- scopes: ids are indices into plan().scopes ---
  const plan::ModelPlan& plan() const { return plan_; }
  Scopes& scopes();
  void begin_forward();

  // --- training ---
  engine::StepControl& control();
  void begin_backward();
  void end_backward();
  void abandon_backward() noexcept;
  std::optional<engine::StepResult> step(std::span<const engine::GroupScalars> groups);

  // --- values ---
  // Gathers the units of these parameters and keeps them until release(). Nests.
  void gather(std::span<const int> params);
  // `discard`: what was written to the gathered copies is lost, which is the contract of reading.
  void release(std::span<const int> params, bool discard);
  // Collective: what `root` holds now for these gathered parameters becomes everybody's value.
  void publish(std::span<const int> params, int root);
  // A parameter wanted outside any scope; false if it is not ours to gather.
  bool read(int param);
  // Its index, by tensor identity; -1 for tensors that are not parameters of this model.
  int index_of(const at::Tensor& variable) const;
  bool gathered(int param) const;

  engine::Engine& engine();
  const engine::Config& config() const { return config_; }
  ParameterSet& parameters() { return parameters_; }
  c10::Device place() const { return runtime_.place; }
  int threads() const { return runtime_.threads; }  // that work on host memory
  memory::Ledger& ledger() { return *runtime_.device->ledger(); }
  // What the ledger will say of the device when this model has been trained for some steps.
  forecast::MemoryForecast memory_forecast();
  // Collective, so that no peer still reads what goes. `keep_values`: parameters get memory of
  // their own.
  void destroy(bool keep_values);
  // Collective: returns when every rank has come so far. For the end of a program: a rank that
  // leaves while another still gathers would look like one that died.
  void wait_for_all() {
    engine().gatherer().complete_all();
    engine().collectives().barrier();
  }
  bool alive() const { return engine_ != nullptr; }
  // Files that were mapped for what the parameters had, and that nobody reads any more.
  void hold_files(std::vector<c10::DataPtr> mapped_files) { files_ = std::move(mapped_files); }
  // Once the model is set up, since the system does much of it with all of the process's memory
  // locked: what the parameters had, and those files, are freed from here on, by threads, beside
  // what follows. Until then they stay.
  void free_originals();

 private:
  void check_ranks(const ModelInput& input) const;
  void start(const ModelInput& input, engine::UpdateRule rule, std::string name,
             ThreadPool& threads, OriginalValues& originals);
  void give_back(OriginalValues& originals) noexcept;
  void complete_for_reader(int unit);
  void require_alive() const;
  void let_go(std::vector<at::Tensor> full);

  engine::Config config_;
  ModelRuntime runtime_;
  std::vector<plan::ParamSpec> specs_;
  plan::ModelPlan plan_;
  plan::ModuleTree tree_;
  engine::UpdateRule rule_;
  ParameterSet parameters_;
  std::unordered_map<const void*, int> index_;  // by TensorImpl
  std::unordered_map<int, int> held_;           // by unit: gather() without release()
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<engine::StepControl> control_;
  std::unique_ptr<Scopes> scopes_;
  std::unique_ptr<GradientHooks> hooks_;
  std::optional<c10::Stream> step_stream_;  // of the last step
  std::vector<at::Tensor> originals_;       // what the parameters had, if it is not being freed
  std::vector<c10::DataPtr> files_;         // of which that was a part
  std::vector<std::jthread> freeing_;
};

}  // namespace strata::torch

// Trainer: trains a libtorch model sharded over ranks, without Python. The C++ counterpart of
// strata.initialize() in Python.
//
//   auto model = Model(...);                              // on every rank; rank 0's values win
//   strata::torch::Trainer trainer(model.ptr(), {.config = "ds_config.json"});
//   model->call = trainer.call();                         // a ScopedCall, see scoped_call.h
//   for (...) {
//     at::Tensor loss = loss_of(trainer.forward(*model, batch), targets);
//     trainer.backward(loss);
//     trainer.step();                                     // updates at accumulation boundaries
//   }
//   trainer.save("trained");
//   trainer.close();
//
// Construction takes the model's parameters over: at stage 3 they are empty except while a call
// uses them. The optimizer is the configuration's Adam or AdamW, or the param groups given here;
// the scheduler is the configuration's.
//
// Threads: one thread at a time for each rank; ranks may be threads of one process, each with its
// own model and trainer. Ownership: shares the module; owns the parameters' memory until close().
// Collective, on all ranks in the same order: construction, step() at a boundary, save(), load(),
// save_checkpoint(), load_checkpoint(), close(), the destructor of an open trainer. Units: bytes in
// the ledger, L2 norms before clipping. Errors: ConfigError, CommError, OutOfMemoryError,
// NumericsError (too many steps in a row whose gradients are not finite; the weights are
// unchanged), IoError and FormatError of files; UsageError for calls out of order and after
// close().
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "strata/engine/schedule/schedule.h"
#include "strata/torch/scoped_call.h"

namespace strata::torch {

// Parameters that share hyper-parameters.
struct ParamGroup {
  std::vector<at::Tensor> parameters;
  engine::GroupScalars scalars;
};

struct TrainerOptions {
  std::string config;  // JSON text, or the path of a JSON file (docs/CONFIG.md)
  // Empty: one group of all trainable parameters, as the configuration says. Else every trainable
  // parameter is in exactly one; AdamW where the configuration names no optimizer. With neither,
  // the trainer is for evaluation.
  std::vector<ParamGroup> groups = {};
  // Null: found from RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (rank_environment.h).
  std::shared_ptr<comm::Collectives> collectives = nullptr;
};

class Trainer : NonCopyable {
 public:
  Trainer(std::shared_ptr<::torch::nn::Module> module, TrainerOptions options);
  // Waits for the other ranks as close() does, unless an exception is on its way.
  ~Trainer();

  // The object through which the model's forward calls its parts. Copies are cheap.
  ScopedCall call() const { return ScopedCall(scopes_); }

  // Begins a pass and runs the root module's forward. `root` is the module that was given, under
  // its own type.
  template <typename Root, typename... Args>
  auto forward(Root& root, Args&&... args) {
    require_root(root);
    RootCall call(*model_);
    auto result = run_within(*model_, scopes_->of_root(), root, std::forward<Args>(args)...);
    call.leave(result);
    return result;
  }

  // Runs autograd from a scalar. The loss is divided by the accumulation steps, and scaled under
  // fp16, on the way. loss.backward() does the same; under fp16 of scale(loss).
  void backward(const at::Tensor& loss);
  at::Tensor scale(const at::Tensor& loss) { return model_->scale(loss); }
  // Ends a micro-step. At an accumulation boundary it updates the weights, steps the schedule, and
  // returns the step's result; elsewhere it returns nullopt.
  std::optional<engine::StepResult> step();

  // The engine reads these at every step; a schedule of the configuration writes the rates here.
  std::vector<engine::GroupScalars>& groups() { return groups_; }

  std::optional<double> grad_norm() const { return model_->control().grad_norm(); }
  std::int64_t global_steps() const { return model_->control().global_steps(); }
  std::int64_t skipped_steps() const { return model_->control().skipped_steps(); }
  bool at_boundary() const { return model_->control().at_boundary(); }
  double loss_scale() const { return model_->control().loss_scaler().scale(); }
  // Samples of one rank in one forward, and forwards in one optimizer step; completed from the
  // configuration and the number of ranks.
  std::int64_t micro_batch_size() const { return config().batch.micro_batch_size.value(); }
  std::int64_t accumulation_steps() const { return model_->control().accumulation_steps(); }
  int rank() const { return collectives_->rank(); }
  int world_size() const { return collectives_->world_size(); }
  comm::Collectives& collectives() { return *collectives_; }
  const engine::Config& config() const { return model_->config(); }

  // The bytes that the engine holds on this rank, by tier and kind; report() puts them in one line.
  const memory::Ledger& ledger() const { return model_->ledger(); }

  // Writes parameters and buffers, by their names in the module, as safetensors in `folder`, one
  // unit at a time. The folder's old files stay until the new ones are complete.
  void save(const std::string& folder);
  // Fills parameters and buffers from such a folder, or from one .safetensors file. Each rank reads
  // its own ranges. The optimizer's states do not change.
  void load(const std::string& path);

  // Saves the state of training into folder/tag, completely or not at all. Any number of ranks and
  // any stage can load it, and so can Python's engine. `tag` empty: "global_step<n>".
  void save_checkpoint(const std::string& folder, const std::string& tag = "");
  // Loads such a checkpoint and returns its path; `tag` empty: the one that the folder's `latest`
  // names. Nullopt: the folder has no `latest`.
  std::optional<std::string> load_checkpoint(const std::string& folder,
                                             const std::string& tag = "");

  // Removes every hook and frees the engine's memory. The module's parameters then have memory of
  // their own: with values if the stage keeps them whole or with `keep_values`, else empty.
  void close(bool keep_values = false) { model_->destroy(keep_values); }

  // For calls that the trainer lacks: gather() and release() of parameters, units, no_sync.
  ShardedModel& model() { return *model_; }

 private:
  void require_root(const ::torch::nn::Module& root) const;
  void make_scheduler();
  void write_rates(const engine::Rates& rates);
  void settle_schedule();

  std::shared_ptr<::torch::nn::Module> module_;
  std::shared_ptr<comm::Collectives> collectives_;
  std::shared_ptr<ShardedModel> model_;
  std::shared_ptr<const ModuleScopes> scopes_;
  std::vector<engine::GroupScalars> groups_;
  bool schedule_is_ahead_ = false;  // stepped before a step that may be skipped
  std::optional<engine::Scheduler> scheduler_;
  int exceptions_;  // in flight when this was made
};

}  // namespace strata::torch

// Loads a checkpoint that training goes on from, whatever world size, stage and placement saved it:
// each rank reads the byte ranges that its own shards need, by the loader that start-up has, and
// verifies every block that it reads. No rank stores anything before all have checked what can be
// checked.
//
// Threads: the engine's. Memory: one TransferRing. Errors, on every rank alike: FormatError for a
// manifest or a block that is not what was written, by file, tensor and place, and for a checkpoint
// of another model, by parameters and buffers; IoError for files that are missing or too short.
// After an error while values were being stored the engine neither trains nor saves until something
// was loaded whole.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "strata/checkpoint/pipeline.h"
#include "strata/engine/checkpoint/training_checkpoint.h"
#include "strata/engine/engine.h"
#include "strata/engine/step_control.h"
#include "strata/io/io_engine.h"

namespace strata::engine {

// Where what an optimizer of the user's keeps of this rank's part of a parameter is to be stored.
struct StateTarget {
  int param = 0;
  std::string kind;
  DType dtype = DType::kFloat32;
  std::byte* memory = nullptr;  // of the device, of the first element that this rank owns
};

struct LoadRequest {
  bool states = true;  // of the optimizer
  // False: parameters that only one of model and checkpoint has are left alone.
  bool strict = true;
  // Frozen parameters that the checkpoint lacks are no difference: it was saved without them.
  bool without_frozen = false;
  std::vector<StateTarget> targets;
  // All buffers of this rank's model: compared as parameters are. Their owner reads them.
  std::vector<BufferSpec> buffers;
};

// Collective: values, and the optimizer's states where they are asked for. The caller restores
// progress (restore_progress()) afterwards.
void load_training(Engine& engine, const TrainingCheckpoint& checkpoint, const LoadRequest& request,
                   io::IoEngine& io, const checkpoint::RingOptions& staging = {});

// How far training has come, as members of a checkpoint's "training" object:
//   global_steps, micro_steps, micro_batches, skipped_steps   counts of StepControl
//   loss_scale        the factor, and under "loss_scaler" the scaler's state
//   optimizer_steps   of our Adam: {"all": n, "missed": {parameter: steps}}
// Errors: FormatError for members of other kinds.

// `training`, a JSON object, with these members set.
std::string with_progress(std::string_view training, Engine& engine, const StepControl& control);

// The counts of steps and the loss scale; `path` names the checkpoint in messages.
void restore_progress(std::string_view training, StepControl& control, std::string_view path);
// The steps of the engine's own optimizer, with its states.
void restore_optimizer_steps(std::string_view training, Engine& engine, std::string_view path);

}  // namespace strata::engine

// How far training has come, as the members of a checkpoint's "training" object that the core
// knows:
//   global_steps, micro_steps, micro_batches, skipped_steps   counts of StepControl
//   loss_scale                                 the factor, and under "loss_scaler" the scaler's
//   state optimizer_steps                            of our Adam: {"all": n, "missed": {parameter:
//   steps}}
// Threads: the engine's. Errors: FormatError for members of other kinds.
#pragma once

#include <string>
#include <string_view>

#include "strata/engine/step_control.h"

namespace strata::engine {

// `training`, a JSON object, with these members set.
std::string with_progress(std::string_view training, Engine& engine, const StepControl& control);

// The counts of steps and the loss scale; `path` names the checkpoint in messages.
void restore_progress(std::string_view training, StepControl& control, std::string_view path);
// The steps of Adam, with its moments.
void restore_optimizer_steps(std::string_view training, Engine& engine, std::string_view path);

}  // namespace strata::engine

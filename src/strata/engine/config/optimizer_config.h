// The optimizer and the learning-rate scheduler that a configuration names. The optimizer is the
// engine's own Adam or AdamW, or a class of torch.optim that works elementwise, so that it can run
// on shards. Plain values. Errors: ConfigError.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "strata/engine/config/remarks.h"
#include "strata/engine/schedule/schedule.h"
#include "strata/kernels/update.h"

namespace strata::engine {

class Settings;

enum class OptimizerKind : std::uint8_t {
  kAdam,   // the engine's kernel; see `adam`
  kTorch,  // torch.optim.<torch_class>(..., **torch_params)
};

struct OptimizerConfig {
  std::string type;  // as the configuration spells it
  OptimizerKind kind = OptimizerKind::kAdam;
  kernels::UpdateScalars adam;      // of a class of torch.optim `decoupled` alone
  std::string torch_class;          // "SGD"
  std::string torch_params = "{}";  // keyword arguments as JSON text
  // The engine's kernel computes the update. It does so for torch's Adam and AdamW, too, unless
  // their parameters ask for a feature that the kernel lacks.
  bool in_own_kernel = true;
  bool in_8_bits = false;  // by its type: "AdamW8bit"
};

// An optimizer section that does not say which optimizer, in a configuration of a training.
void record_missing_type(const nlohmann::json& document, ConfigFindings* remarks);

// Reads optimizer.type and optimizer.params out of `settings`, and adds the parameters read to it.
OptimizerConfig read_optimizer(Settings* settings, ConfigFindings* remarks);

// Whether states have 8 bits, by strata.optimizer_states or the optimizer's type. ConfigError where
// these contradict each other or bf16.bf16_optimizer_states, or the optimizer has no such states.
bool has_states_8bit(const Settings& settings, const std::optional<OptimizerConfig>& optimizer);

struct SchedulerConfig {
  ScheduleParams params;             // for make_schedule()
  std::int64_t last_iteration = -1;  // for Scheduler
};

// One of torch.optim.lr_scheduler, for Python.
struct TorchSchedulerConfig {
  std::string type;    // "CosineAnnealingLR"
  std::string params;  // keyword arguments as JSON text
};

// Absent where scheduler.type names none.
std::optional<TorchSchedulerConfig> read_torch_scheduler(Settings* settings,
                                                         ConfigFindings* remarks);

// Reads scheduler.type and scheduler.params out of `settings`, and adds the parameters read to it.
// Absent while one of them is still to be filled in (remarks->open).
std::optional<SchedulerConfig> read_scheduler(Settings* settings, ConfigFindings* remarks);

}  // namespace strata::engine

// The learning-rate scheduler that a configuration names. Plain values. Errors: ConfigError.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "strata/engine/config/remarks.h"
#include "strata/engine/schedule/schedule_params.h"

namespace strata::engine {

class Settings;

struct SchedulerConfig {
  std::string type;
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

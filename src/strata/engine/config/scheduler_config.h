// The learning-rate scheduler that a configuration names. Plain values. Errors: ConfigError.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "strata/engine/config/hint.h"
#include "strata/engine/schedule/schedule_params.h"

namespace strata::engine {

class Settings;

struct SchedulerConfig {
  std::string type;
  ScheduleParams params;             // for make_schedule()
  std::int64_t last_iteration = -1;  // for Scheduler
};

// Reads scheduler.type and scheduler.params out of `settings`, and adds the parameters read to it.
SchedulerConfig read_scheduler(Settings* settings, std::vector<Hint>* hints);

}  // namespace strata::engine

#include "strata/engine/config/plan_options.h"

#include <algorithm>

namespace strata::engine {

plan::PlanOptions plan_options_from(const Config& config) {
  plan::PlanOptions options;
  options.wrap = config.strata.wrap;
  options.leaves = {config.zero.leaf.classes, config.zero.leaf.names,
                    config.zero.leaf.name_suffixes};
  if (config.strata.unit_size) {
    options.unit_bytes = *config.strata.unit_size;
    options.block_unit_bytes = *config.strata.unit_size;
  }
  if (config.zero.stage == 3) {
    options.one_by_one = config.zero.allgather_sequential;
    if (config.strata.unit_size) {
      options.small_bytes = std::min(options.small_bytes, *config.strata.unit_size);
    }
    options.persistence_threshold = config.zero.param_persistence_threshold;
    options.persistence_total = config.zero.model_persistence_threshold;
    // strata.max_live_bytes does not change the units: strata.unit_size sets their size.
    if (!config.strata.max_live) options.shared_numel = config.zero.max_live_parameters;
  }
  return options;
}

}  // namespace strata::engine

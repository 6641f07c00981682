#include "strata/engine/record/step_record.h"

#include <array>

namespace strata::engine {

std::string_view name_of(Activity activity) {
  constexpr std::array<std::string_view, kActivityCount> kNames{
      "forward pass", "backward pass", "update",      "forward",      "recompute",
      "backward",     "gather wait",   "reduce wait", "refresh wait", "copy wait",
      "norm",         "optimizer",     "gather",      "refresh",      "reduce",
      "peers ready",  "upload",        "download",    "drive read",   "drive write",
  };
  return kNames.at(static_cast<std::size_t>(activity));
}

}  // namespace strata::engine

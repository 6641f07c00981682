#include "strata/engine/unfreezing.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <vector>

#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"
#include "strata/engine/unit/consistency.h"

namespace strata::engine {

void Unfreezing::train(std::span<const int> params) {
  std::vector<std::string> names;
  for (const int param : params) {
    const plan::ParamSpec& spec = weights_.param(param);
    names.push_back(fmt::format("'{}' in group {}", spec.name, spec.group));
  }
  try {
    agree_on_text(collectives_, "list of unfrozen parameter",
                  fmt::format("{}", fmt::join(names, "\n")));
  } catch (const CommError& error) {
    throw CommError(
        fmt::format("this rank has unfrozen parameters (requires_grad, or add_param_group) and "
                    "another has not; "
                    "do it on every rank before the same forward; found here: {}; {}",
                    fmt::join(names, ", "), error.what()));
  }
  agree_after(collectives_, "making room to train parameters that were frozen",
              [&] { make_room(params); });
}

void Unfreezing::make_room(std::span<const int> params) {
  weights_.back_all();
  std::vector<int> units;
  std::vector<int> added;  // of them, those that were frozen as a whole
  for (const int param : params) {
    Unit& unit = weights_.unit_of(param);
    weights_.spec_of(param).trainable = true;
    if (!unit.trainable()) {
      unit.spec.trainable = true;
      unit.frozen = unit.spec.params;
      weights_.masters().train(unit);
      added.push_back(unit.id);
    }
    std::erase(unit.frozen, param);
    reducer_.expect(unit.id, weights_.slot_index_of(param));
    if (std::ranges::find(units, unit.id) == units.end()) units.push_back(unit.id);
  }
  for (const int unit : units) {
    shards_.add(unit);
    if (optimizer_ != nullptr) optimizer_->add(unit, std::ranges::find(added, unit) != added.end());
  }
}

}  // namespace strata::engine

// The error of a step() that no backward pass has gone before since the last one: nothing has
// changed then. A class of its own, since a script may end a step twice (engine.step() and
// optimizer.step()), and whoever drives the engine tells that from a mistake. Plain value.
#pragma once

#include "strata/base/error.h"

namespace strata::engine {

class MissingBackward : public UsageError {
 public:
  using UsageError::UsageError;
};

}  // namespace strata::engine

// The error of a step() without a backward pass since the last step(): nothing has changed then. It
// has a class of its own, since a script may end a step twice (engine.step() and optimizer.step()),
// and the engine's caller tells that from a mistake. Plain value.
#pragma once

#include "strata/base/error.h"

namespace strata::engine {

class MissingBackward : public UsageError {
 public:
  using UsageError::UsageError;
};

}  // namespace strata::engine

// Strata's element types and torch's. Pure functions.
#pragma once

#include <c10/core/ScalarType.h>

#include "strata/base/dtype.h"

namespace strata::torch {

// Throws UsageError for types that parameters cannot have here (complex, quantised).
DType from_scalar_type(c10::ScalarType type);
c10::ScalarType to_scalar_type(DType dtype);

}  // namespace strata::torch

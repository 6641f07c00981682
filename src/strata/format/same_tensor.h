// Whether two tensors of a checkpoint hold the same bytes, which decides whether parameters that a
// model may tie are one or two. Reads pieces of bounded size on the calling thread. Safe
// everywhere. Errors: FormatError for a name that is not there; IoError.
#pragma once

#include <string_view>

#include "strata/format/checkpoint_index.h"

namespace strata::format {

// False, without reading, where dtype or shape differ.
bool same_tensor(const CheckpointIndex& checkpoint, std::string_view one, std::string_view other);

}  // namespace strata::format

// Reads model.safetensors.index.json: the name of the file that holds each tensor. Bounded and
// checked: the file's size, the kinds of its values, keys that are there twice, names of files that
// lead out of the folder. Threads: safe everywhere. Errors: IoError, FormatError.
#pragma once

#include <map>
#include <string>

#include "strata/base/units.h"

namespace strata::format {

inline constexpr Bytes kIndexBytesMax = 100'000'000_B;

// Tensor name to file name.
using FileOfTensor = std::map<std::string, std::string>;

FileOfTensor read_weight_map_json(const std::string& path);

}  // namespace strata::format

// Reads model.safetensors.index.json: the name of the file that holds each tensor. Bounded and
// checked: the file's size, the kinds of its values, keys that are there twice, names of files that
// lead out of the folder. Threads: safe everywhere. Errors: IoError, FormatError.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "strata/base/units.h"

namespace strata::format {

inline constexpr Bytes kIndexBytesMax = 100'000'000_B;

struct WeightFiles {
  struct Entry {
    std::string tensor;
    std::size_t file = 0;  // of `files`
  };
  std::vector<std::string> files;  // names, each once, in order
  std::vector<Entry> tensors;      // each once, in the order of their names
};

WeightFiles read_weight_map_json(const std::string& path);

}  // namespace strata::format

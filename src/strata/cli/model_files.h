// The files of a model in a checkpoint's folder beside its weights: config.json and the like. They
// are copied unchanged, each whole or not at all. Threads: one. Memory: one small buffer. Errors:
// IoError.
#pragma once

#include <string>
#include <vector>

namespace strata::cli {

// Copies regular files that hold text of a model (.json, .txt, .jinja, .model), but for the
// manifest and what belongs to weights; follows no link. The names that were copied, in order.
std::vector<std::string> copy_model_files(const std::string& from, const std::string& to);

}  // namespace strata::cli

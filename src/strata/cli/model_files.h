// What a checkpoint's folder keeps of a model beside its weights: config.json, the tokenizer, in
// the folder hf/. Copied as they are, each whole or not at all. Threads: one. Memory: one small
// buffer. Errors: IoError.
#pragma once

#include <string>
#include <vector>

namespace strata::cli {

inline constexpr const char* kModelFilesFolder = "hf";

// Copies regular files, but for weights and folders, and follows no link out of `from`. The names
// that were copied, in order; none where there is no such folder.
std::vector<std::string> copy_model_files(const std::string& from, const std::string& to);

}  // namespace strata::cli

// A training checkpoint for tests. A writer that knows only the manifest and the layout of
// safetensors writes it to a folder of its own. It cuts tensors evenly over ranks; each rank has a
// file for values and one for the optimizer's states. Threads: one. Units: elements.
#pragma once

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "strata/format/manifest.h"

namespace strata::cli {

// A folder that goes with its object.
class TestFolder {
 public:
  TestFolder();
  ~TestFolder();
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

struct SavedTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  DType dtype = DType::kBFloat16;  // in which the model computes
  bool trainable = true;           // then fp32 values and two moments are saved
  std::vector<std::string> aliases = {};
  format::TensorRole role = format::TensorRole::kParameter;
};

struct SavedCheckpoint {
  std::string tag = "global_step10";
  int ranks = 2;
  Bytes block = 64_B;  // of checksums
  std::string training = R"({"global_steps":10,"micro_steps":20,"skipped_steps":1,)"
                         R"("loss_scale":1024.0,"written_by":"strata test"})";
  // The values of a tensor: element i of a kind ("value": as many, with sign).
  std::function<float(const std::string& name, std::size_t kind, std::int64_t i)> value =
      [](const std::string& name, std::size_t kind, std::int64_t i) {
        return static_cast<float>(i + 1) * (kind == 0 ? 0.5F : 0.25F) +
               static_cast<float>(name.size());
      };
  std::vector<SavedTensor> tensors = {
      {"embed.weight", {8, 4}, DType::kBFloat16, true, {"lm_head.weight"}},
      {"layers.0.weight", {4, 4}},
      {"layers.1.weight", {4, 4}},
      {"layers.10.scale", {3}, DType::kFloat32, false},
      {"layers.10.steps", {2}, DType::kInt64, false, {}, format::TensorRole::kBuffer}};

  // Into FOLDER/TAG; `latest` too.
  format::Manifest write(const std::string& folder) const;
};

void write_text(const std::string& path, const std::string& text);
std::string read_text(const std::string& path);
// Inverts a bit of the byte.
void flip_byte(const std::string& path, std::int64_t offset);

}  // namespace strata::cli

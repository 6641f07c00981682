#include "strata/cli/named_model.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "strata/base/error.h"
#include "strata/checkpoint/folder.h"
#include "strata/cli/console.h"
#include "strata/cli/tensor_source.h"
#include "strata/format/checkpoint_index.h"
#include "strata/format/sharded_writer.h"
#include "strata/io/pending_range.h"

namespace strata::cli {
namespace {

namespace fs = std::filesystem;

constexpr Bytes kConfigBytesMax = 16_MiB;
// Names of buffers that modules write into files.
constexpr std::array<std::string_view, 6> kBufferNames{"running_mean",        "running_var",
                                                       "num_batches_tracked", "inv_freq",
                                                       "masked_bias",         "position_ids"};
constexpr std::array<std::string_view, 4> kEmbeddingNames{"wte", "wpe", "shared", "embeddings"};
constexpr std::array<std::string_view, 5> kHeadNames{"lm_head", "head", "score", "classifier",
                                                     "embed_out"};

bool is_number(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

bool is_one_of(std::string_view name, const auto& names) {
  return std::ranges::find(names, name) != names.end();
}

bool is_embedding_name(std::string_view name) {
  return name.find("embed") != std::string_view::npos || is_one_of(name, kEmbeddingNames);
}

bool is_norm_name(std::string_view name) {
  return name.find("norm") != std::string_view::npos || name.starts_with("ln_");
}

struct Module {
  std::map<std::string, std::unique_ptr<Module>, NaturalLess> children;
  std::vector<const NamedTensor*> params;  // own

  bool is_list() const {
    return params.empty() && !children.empty() &&
           std::ranges::all_of(children, [](const auto& child) { return is_number(child.first); });
  }
  // A table whose rows are looked up: its backward does without it.
  bool is_embedding(std::string_view name) const {
    return children.empty() && params.size() == 1 && params.front()->shape.size() == 2 &&
           params.front()->name.ends_with("weight") && is_embedding_name(name);
  }
};

// As constructors usually make them.
int rank_of(std::string_view name) {
  if (is_one_of(name, kHeadNames)) return 3;
  if (is_norm_name(name)) return 2;
  return is_embedding_name(name) ? 0 : 1;
}

// Appends the module, and what is in it, to a model.
void append(const Module& module, const std::string& path, const std::string& name, int parent,
            const std::string& class_name, NamedModel& model, std::optional<int>& embedding) {
  const int index = static_cast<int>(model.tree.size());
  const bool lookup = module.is_embedding(name);
  model.tree.push_back({path, class_name, parent, {}, !module.is_list(), !lookup});
  for (const NamedTensor* tensor : module.params) {
    const int param = static_cast<int>(model.params.size());
    if (lookup && !embedding) embedding = param;
    model.tree.back().params.push_back(param);
    model.params.push_back({tensor->name, tensor->shape, tensor->dtype, tensor->trainable, 0});
  }
  std::vector<std::string> names;
  for (const auto& child : module.children) names.push_back(child.first);
  std::ranges::stable_sort(names, {}, rank_of);
  for (const std::string& child : names)
    append(*module.children.at(child), path.empty() ? child : path + "." + child, child, index,
           module.is_list() ? "item of " + path : child, model, embedding);
}

// The configuration of a Hugging Face folder; null if there is none that can be read.
nlohmann::json read_config(const std::string& folder) {
  const std::string path = folder + "/config.json";
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return nullptr;
  const io::File file(path, io::File::Mode::kRead);
  std::string text(std::min(file.size(), kConfigBytesMax).size(), '\0');
  io::read_fully(file, Bytes(), std::as_writable_bytes(std::span(text)));
  return nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
}

// A model that generates text and whose files hold no head has that of its embedding.
bool ties_its_head(const nlohmann::json& config, const std::vector<NamedTensor>& tensors) {
  if (!config.is_object()) return false;
  const nlohmann::json names = config.value("architectures", nlohmann::json());
  const auto generates = [](const nlohmann::json& name) {
    const auto text = name.is_string() ? name.get<std::string>() : "";
    return text.ends_with("ForCausalLM") || text.ends_with("LMHeadModel") ||
           text.ends_with("ForConditionalGeneration");
  };
  return names.is_array() && std::any_of(names.begin(), names.end(), generates) &&
         std::ranges::none_of(tensors, [](const NamedTensor& tensor) {
           return is_one_of(tensor.name.substr(0, tensor.name.find('.')), kHeadNames);
         });
}

[[noreturn]] void refuse_without_weights(const std::string& path) {
  const bool has_index = fs::exists(path + "/" + format::kIndexFileName);
  throw UsageError(
      "names and shapes come from the headers of safetensors files, and this folder holds {}; "
      "download the model's weights, or ask in Python with the model on the meta device, which "
      "needs none: strata.memory_forecast(model, config, world_size): path={}",
      has_index ? "only their index" : "none", path);
}

NamedModel read_training(const std::string& path) {
  const format::Manifest manifest = format::read_manifest(checkpoint::choose_checkpoint(path).path);
  std::vector<NamedTensor> tensors;
  bool tied = false;
  for (const format::ManifestTensor& tensor : manifest.tensors) {
    if (tensor.role != format::TensorRole::kParameter) continue;
    tensors.push_back({tensor.name, tensor.shape, tensor.dtype, tensor.trainable});
    tied = tied || std::ranges::any_of(tensor.aliases, [](const std::string& alias) {
             return is_one_of(alias.substr(0, alias.find('.')), kHeadNames);
           });
  }
  return model_from_names(tensors, tied);
}

NamedModel read_hugging_face(const std::string& path) {
  std::error_code error;
  const bool folder = fs::is_directory(path, error);
  const bool any = std::ranges::any_of(
      fs::directory_iterator(folder ? path : "."),
      [](const fs::directory_entry& entry) { return entry.path().extension() == ".safetensors"; });
  if (folder && !any) refuse_without_weights(path);
  const format::CheckpointIndex index(path);
  std::vector<NamedTensor> tensors;
  std::size_t frozen = 0;
  for (const format::CheckpointTensor& tensor : index.tensors()) {
    const format::TensorInfo& info = tensor.info;
    if (is_one_of(info.name.substr(info.name.rfind('.') + 1), kBufferNames)) continue;
    const bool trainable = is_floating(info.dtype);
    frozen += trainable ? 0U : 1U;
    tensors.push_back({info.name, info.shape, info.dtype, trainable});
  }
  NamedModel model =
      model_from_names(tensors, ties_its_head(folder ? read_config(path) : nullptr, tensors));
  model.remarks.emplace_back("all floating parameters are taken to be trained");
  if (frozen > 0)
    model.remarks.push_back(
        fmt::format("{} tensors of no floating dtype are taken to be frozen", frozen));
  return model;
}

}  // namespace

NamedModel model_from_names(const std::vector<NamedTensor>& tensors, bool tied_head) {
  Module root;
  for (const NamedTensor& tensor : tensors) {
    Module* module = &root;
    std::string_view rest = tensor.name;
    for (std::size_t dot = rest.find('.'); dot != std::string_view::npos; dot = rest.find('.')) {
      auto& child = module->children[std::string(rest.substr(0, dot))];
      if (child == nullptr) child = std::make_unique<Module>();
      module = child.get();
      rest.remove_prefix(dot + 1);
    }
    module->params.push_back(&tensor);
  }
  NamedModel model;
  std::optional<int> embedding;  // the first
  append(root, "", "", -1, "Model", model, embedding);
  if (tied_head && embedding) {
    model.tree.push_back({"lm_head", "lm_head", 0, {*embedding}, true, true});
    model.remarks.emplace_back("the files hold no head: it is taken to share the weight of '" +
                               model.params[static_cast<std::size_t>(*embedding)].name + "'");
  }
  return model;
}

NamedModel read_model(const std::string& path) {
  std::error_code error;
  if (!fs::exists(path, error)) {
    throw UsageError(
        "there is no such file or folder; give a Hugging Face folder with safetensors: path={}",
        path);
  }
  return checkpoint::holds_checkpoints(path) ? read_training(path) : read_hugging_face(path);
}

}  // namespace strata::cli

#include "strata/cli/named_model.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <memory>
#include <regex>
#include <set>
#include <string_view>

#include "strata/base/error.h"
#include "strata/checkpoint/folder.h"
#include "strata/cli/console.h"
#include "strata/format/checkpoint_index.h"
#include "strata/format/json.h"

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

bool is_one_of(std::string_view name, const auto& names) {
  return std::ranges::find(names, name) != names.end();
}

bool is_embedding_name(std::string_view name) {
  return name.find("embed") != std::string_view::npos || is_one_of(name, kEmbeddingNames);
}

// Whether it is in a head, or the head itself.
bool is_of_head(const std::string& name) {
  return is_one_of(name.substr(0, name.find('.')), kHeadNames);
}

struct Module {
  std::map<std::string, std::unique_ptr<Module>, NaturalLess> children;
  std::vector<const plan::ParamSpec*> params;  // own
  std::size_t place = 0;                       // among all modules, by their first parameters

  bool is_list() const {
    return params.empty() && !children.empty() &&
           std::ranges::all_of(children, [](const auto& child) {
             return !child.first.empty() &&
                    child.first.find_first_not_of("0123456789") == std::string::npos;
           });
  }
  // A table whose rows are looked up: its backward does without it.
  bool is_embedding(std::string_view name) const {
    return children.empty() && params.size() == 1 && params.front()->shape.size() == 2 &&
           params.front()->name.ends_with("weight") && is_embedding_name(name);
  }
};

// As constructors usually make them.
std::size_t rank_of(std::string_view name) {
  if (is_one_of(name, kHeadNames)) return 3;
  if (name.find("norm") != std::string_view::npos || name.starts_with("ln_")) return 2;
  return is_embedding_name(name) ? 0 : 1;
}

// Appends the module, and what is in it, to a model.
void append(const Module& module, const std::string& path, const std::string& name, int parent,
            const std::string& class_name, NamedModel& model) {
  const int index = static_cast<int>(model.tree.size());
  model.tree.push_back(
      {path, class_name, parent, {}, !module.is_list(), !module.is_embedding(name)});
  for (const plan::ParamSpec* param : module.params) {
    model.tree.back().params.push_back(static_cast<int>(model.params.size()));
    model.params.push_back(*param);
  }
  std::vector<std::string> names;
  for (const auto& child : module.children) names.push_back(child.first);
  std::ranges::stable_sort(names, {}, [&](const std::string& child) {
    return model.in_order ? module.children.at(child)->place : rank_of(child);
  });
  for (const std::string& child : names)
    append(*module.children.at(child), path.empty() ? child : path + "." + child, child, index,
           module.is_list() ? "item of " + path : child, model);
}

// A model's configuration; null if there is none that can be read.
nlohmann::json read_config(const std::string& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return nullptr;
  return nlohmann::json::parse(format::read_text(path, "a model's configuration", kConfigBytesMax),
                               nullptr, /*allow_exceptions=*/false);
}

// A model that generates text and whose files hold no head has that of its embedding.
bool ties_its_head(const nlohmann::json& config, const std::vector<plan::ParamSpec>& params) {
  if (!config.is_object()) return false;
  const nlohmann::json names = config.value("architectures", nlohmann::json());
  const auto generates = [](const nlohmann::json& name) {
    const auto text = name.is_string() ? name.get<std::string>() : "";
    return text.ends_with("ForCausalLM") || text.ends_with("LMHeadModel") ||
           text.ends_with("ForConditionalGeneration");
  };
  return names.is_array() && std::any_of(names.begin(), names.end(), generates) &&
         std::ranges::none_of(params, is_of_head, &plan::ParamSpec::name);
}

NamedModel read_training(const std::string& path) {
  const format::Manifest manifest = format::read_manifest(checkpoint::choose_checkpoint(path).path);
  NamedModel names;
  for (const format::ManifestTensor& tensor : manifest.tensors) {
    if (tensor.role != format::TensorRole::kParameter) continue;
    names.params.push_back({tensor.name, tensor.shape, tensor.dtype, tensor.trainable});
    names.tied_head |= std::ranges::any_of(tensor.aliases, is_of_head);
  }
  return names;
}

NamedModel read_hugging_face(const std::string& path) {
  const nlohmann::json config = read_config(path + "/config.json");
  const format::CheckpointIndex index(path);
  NamedModel names;
  for (const format::CheckpointTensor& tensor : index.tensors()) {
    const format::TensorInfo& info = tensor.info;
    if (is_one_of(info.name.substr(info.name.rfind('.') + 1), kBufferNames)) continue;
    names.params.push_back({info.name, info.shape, info.dtype, is_floating(info.dtype)});
  }
  const auto frozen = std::ranges::count(names.params, false, &plan::ParamSpec::trainable);
  if (frozen > 0)
    names.remarks.push_back(
        fmt::format("{} tensors of no floating dtype are taken to be frozen", frozen));
  names.tied_head = ties_its_head(config, names.params);
  try {
    names.activations = decoder_names(config, path).activations;
  } catch (const UsageError&) {  // an architecture without rules has no estimate
  }
  return names;
}

NamedModel read_names(const std::string& path) {
  std::error_code error;
  if (!fs::exists(path, error)) {
    std::vector<std::string_view> known;
    for (const auto& [name, config] : shipped_models()) {
      if (std::ranges::equal(name, path, {}, ::tolower, ::tolower))
        return decoder_names(config, name);
      known.push_back(name);
    }
    throw UsageError(
        "there is no such file or folder; give a Hugging Face folder with safetensors, a "
        "config.json, or one of the names {}: path={}",
        fmt::join(known, ", "), path);
  }
  if (checkpoint::holds_checkpoints(path)) return read_training(path);
  const bool folder = fs::is_directory(path);
  const bool weights = std::ranges::any_of(
      fs::directory_iterator(folder ? path : "."),
      [](const fs::directory_entry& entry) { return entry.path().extension() == ".safetensors"; });
  if (folder ? weights : !path.ends_with(".json")) return read_hugging_face(path);
  const std::string file = folder ? path + "/config.json" : path;
  return decoder_names(read_config(file), file);
}

std::string module_of(const std::string& name) {
  return name.substr(0, std::min(name.rfind('.'), name.size()));
}

// Gives the linear layers of blocks low-rank adapters, as peft does, and freezes all else. Experts
// in one tensor have the adapters of each, side by side; those of two projections twice as many.
void add_adapters(NamedModel& names, std::int64_t rank) {
  static const std::regex numbered(R"(\.\d+\.)");
  std::set<std::string> linear;
  for (const plan::ParamSpec& tensor : names.params) {
    const std::string path = module_of(tensor.name);
    const bool weight = tensor.name == path + ".weight" && tensor.shape.size() == 2;
    if ((weight || path.ends_with(".experts")) && std::regex_search(path, numbered) &&
        !is_embedding_name(std::string_view(path).substr(path.rfind('.') + 1)))
      linear.insert(path);
  }
  if (linear.empty()) throw UsageError("--lora-rank: no block of the model has a linear layer");
  std::vector<plan::ParamSpec> adapted;
  for (const plan::ParamSpec& tensor : names.params) {
    const std::vector<std::int64_t>& shape = tensor.shape;
    const std::string path = module_of(tensor.name);
    const std::string own = tensor.name.substr(path.size());
    std::string module = "base_model.model." + path;
    const bool is_linear = linear.contains(path);
    const bool fused = is_linear && shape.size() == 3;
    const bool paired = fused && own == ".gate_up_proj";
    adapted.push_back({module +
                           (fused       ? ".base_layer.base_layer"
                            : is_linear ? ".base_layer"
                                        : "") +
                           own,
                       shape, tensor.dtype, /*trainable=*/false});
    if (!fused && (!is_linear || own != ".weight")) continue;
    const std::int64_t width = rank * (fused ? shape[0] : 1) * (paired ? 2 : 1);
    if (paired) module += ".base_layer";
    adapted.push_back({module + ".lora_A.default.weight", {width, shape.back()}});
    adapted.push_back({module + ".lora_B.default.weight", {shape[shape.size() - 2], width}});
  }
  names.params = std::move(adapted);
  names.remarks.emplace_back("adapters of the linear layers of blocks are trained, nothing else");
}

void freeze(NamedModel& names, const std::string& pattern) {
  std::size_t found = 0;
  try {
    const std::regex expression(pattern);
    for (plan::ParamSpec& tensor : names.params) {
      if (!std::regex_search(tensor.name, expression)) continue;
      tensor.trainable = false;
      ++found;
    }
  } catch (const std::regex_error& error) {
    throw UsageError("--frozen: no regular expression of ECMAScript ({}): '{}'", error.what(),
                     pattern);
  }
  if (found == 0)
    throw UsageError("--frozen: no parameter has such a name; --shapes lists them: '{}'", pattern);
  names.remarks.push_back(fmt::format("'{}' freezes {}", pattern, count_of(found, "parameter")));
}

}  // namespace

NamedModel with_tree(NamedModel model) {
  const std::vector<plan::ParamSpec> params = std::exchange(model.params, {});
  Module root;
  std::size_t made = 0;
  for (const plan::ParamSpec& param : params) {
    Module* module = &root;
    std::string_view rest = param.name;
    for (std::size_t dot = rest.find('.'); dot != std::string_view::npos; dot = rest.find('.')) {
      auto& child = module->children[std::string(rest.substr(0, dot))];
      if (child == nullptr) child = std::make_unique<Module>();
      if (child->place == 0) child->place = ++made;
      module = child.get();
      rest.remove_prefix(dot + 1);
    }
    module->params.push_back(&param);
  }
  append(root, "", "", -1, "Model", model);
  const auto embedding = std::ranges::find(model.tree, false, &plan::ModuleNode::read_in_backward);
  if (model.tied_head && embedding != model.tree.end()) {
    const std::vector<int> shared = embedding->params;
    model.tree.push_back({"lm_head", "lm_head", 0, shared, true, true});
    model.remarks.push_back(fmt::format("a head is taken to share the weight of '{}'",
                                        model.params[static_cast<std::size_t>(shared[0])].name));
  }
  return model;
}

NamedModel read_model(const std::string& path, const TrainedPart& trained) {
  NamedModel model = read_names(path);
  if (trained.lora_rank > 0)
    add_adapters(model, trained.lora_rank);
  else if (!checkpoint::holds_checkpoints(path))
    model.remarks.emplace_back("all floating parameters are taken to be trained");
  for (const std::string& pattern : trained.frozen) freeze(model, pattern);
  return with_tree(std::move(model));
}

}  // namespace strata::cli

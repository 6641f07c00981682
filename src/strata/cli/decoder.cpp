#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <sstream>

#include "strata/base/error.h"
#include "strata/cli/named_model.h"

namespace strata::cli {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kNumberMax = 1'000'000;  // of a configuration
constexpr std::int64_t kLayersMax = 10'000;
constexpr double kElementsMax = 1e15;

// Rows are "NAME DIMENSIONS [BIAS]; ...": the parameter NAME.weight, or NAME where "=" ends it.
// Dimensions are letters, with a factor before them: h hidden size; q, k, a widths of all queries,
// of all keys, and of both with values; d of a head; f, m of a dense and of an expert's MLP; e
// experts; v vocabulary; p positions. A bias of the first dimension exists always ("+"), if a key
// of the configuration is true ("?KEY"), or unless it is false ("+KEY").
struct Family {
  const char* types;         // model_type
  Activations::Values norm;  // that one keeps, by its width
  std::string block;         // rows
  int head_dim = 0;          // where the configuration does not say it; 0: hidden size over heads
  bool tied = false;         // likewise
  const char* layers = "model.layers";
  const char* before = "model.embed_tokens v h";
  const char* after = "model.norm h; lm_head v h";

  bool has(std::string_view row) const { return block.find(row) != std::string::npos; }
};

constexpr Activations::Values kLayer{1, 0};
constexpr Activations::Values kRms{1, 1};
constexpr Activations::Values kRmsInFp32{0, 2};
const std::string kAttention =
    "self_attn.q_proj q h ?attention_bias; self_attn.k_proj k h ?attention_bias;"
    "self_attn.v_proj k h ?attention_bias; self_attn.o_proj h q ?attention_bias;";
const std::string kBiased =
    "self_attn.q_proj q h +; self_attn.k_proj k h +; self_attn.v_proj k h +; self_attn.o_proj h q;";
const std::string kHeadNorms = "self_attn.q_norm d; self_attn.k_norm d;";
const std::string kWideNorms = "self_attn.q_norm q; self_attn.k_norm k;";
const std::string kMlp =
    "mlp.gate_proj f h ?mlp_bias; mlp.up_proj f h ?mlp_bias; mlp.down_proj h f ?mlp_bias;";
const std::string kFused =
    "self_attn.o_proj h q; self_attn.qkv_proj a h; mlp.gate_up_proj 2f h; mlp.down_proj h f;";
const std::string kExperts = "mlp.experts.gate_up_proj= e 2m h; mlp.experts.down_proj= e h m;";
const std::string kRouter = "mlp.gate e h;";
const std::string kPostNorm = "post_attention_layernorm h;";
const std::string kNorms = "input_layernorm h;" + kPostNorm;
const std::string kMlpNorms = "pre_feedforward_layernorm h; post_feedforward_layernorm h;";
const std::string kGpt2 =
    "ln_1 h +; attn.c_attn h 3h; attn.c_attn.bias= 3h; attn.c_proj h h +; ln_2 h +;"
    "mlp.c_fc h f; mlp.c_fc.bias= f; mlp.c_proj f h; mlp.c_proj.bias= h";
const std::string kNeoX =
    "input_layernorm h +; post_attention_layernorm h +; attention.query_key_value 3h h "
    "+attention_bias; attention.dense h h +attention_bias; mlp.dense_h_to_4h f h +;"
    "mlp.dense_4h_to_h h f +";

const std::vector<Family> kFamilies{
    {"llama mistral granite", kRms, kAttention + kMlp + kNorms},
    {"qwen2", kRms, kBiased + kMlp + kNorms},
    {"qwen3", kRms, kAttention + kHeadNorms + kMlp + kNorms, 128},
    {"phi3", kRms, kFused + kNorms},
    {"olmo2", kRmsInFp32,
     kAttention + kWideNorms + kMlp + kPostNorm + "post_feedforward_layernorm h"},
    {"gemma", kRmsInFp32, kAttention + kMlp + kNorms, 256, true},
    {"gemma2", kRmsInFp32, kAttention + kMlp + kNorms + kMlpNorms, 256, true},
    {"gemma3_text", kRmsInFp32, kAttention + kHeadNorms + kMlp + kNorms + kMlpNorms, 256, true},
    {"mixtral", kRms, kAttention + kRouter + kExperts + kNorms},
    {"qwen3_moe", kRms, kAttention + kHeadNorms + kExperts + kRouter + kNorms},
    {"gpt2", kLayer, kGpt2, 0, true, "transformer.h", "transformer.wte v h; transformer.wpe p h",
     "transformer.ln_f h +; lm_head v h"},
    {"gpt_neox", kLayer, kNeoX, 0, false, "gpt_neox.layers", "gpt_neox.embed_in v h",
     "gpt_neox.final_layer_norm h +; lm_head v h"}};

// A model a line; the head is tied where the last but two is 1; then experts, and those of a token.
constexpr const char* kShipped = R"(
GPT2            gpt2       768  3072 12 12 12  64  50257 1   0 0
Qwen3-0.6B      qwen3     1024  3072 28 16  8 128 151936 1   0 0
Llama-3.2-1B    llama     2048  8192 16 32  8  64 128256 1   0 0
Qwen3-1.7B      qwen3     2048  6144 28 16  8 128 151936 1   0 0
Llama-3.2-3B    llama     3072  8192 28 24  8 128 128256 1   0 0
Qwen3-4B        qwen3     2560  9728 36 32  8 128 151936 1   0 0
Mistral-7B-v0.3 mistral   4096 14336 32 32  8 128  32768 0   0 0
Qwen2.5-7B      qwen2     3584 18944 28 28  4 128 152064 0   0 0
Llama-3.1-8B    llama     4096 14336 32 32  8 128 128256 0   0 0
Qwen3-8B        qwen3     4096 12288 36 32  8 128 151936 0   0 0
Gemma-2-9B      gemma2    3584 14336 42 16  8 256 256000 1   0 0
Qwen3-14B       qwen3     5120 17408 40 40  8 128 151936 0   0 0
Qwen3-30B-A3B   qwen3_moe 2048   768 48 32  4 128 151936 0 128 8
Qwen3-32B       qwen3     5120 25600 64 64  8 128 151936 0   0 0
Mixtral-8x7B    mixtral   4096 14336 32 32  8 128  32000 0   8 2
Llama-3.1-70B   llama     8192 28672 80 64  8 128 128256 0   0 0)";

const Family& family_of(const Json& config, const std::string& origin) {
  const Json type = config.is_object() ? config.value("model_type", Json()) : Json();
  std::vector<const char*> known;
  for (const Family& family : kFamilies) {
    known.push_back(family.types);
    std::istringstream types(family.types);
    for (std::string one; types >> one;)
      if (type == one) return family;
  }
  throw UsageError(
      "without weights, shapes are known for these model_type's: {}; a folder with safetensors is "
      "read whatever its type, and strata.memory_forecast(model, config, world_size) takes a model "
      "on the meta device. Found {}: path={}",
      fmt::join(known, " "), type.dump(), origin);
}

// A configuration's numbers, and the values of the letters of rows.
class Numbers {
 public:
  Numbers(const Json& config, const Family& family, const std::string& origin)
      : config_(config), origin_(origin) {
    const std::int64_t heads = get({"num_attention_heads", "n_head"});
    of['h'] = get({"hidden_size", "n_embd"});
    of['v'] = get({"vocab_size"});
    of['p'] = get({"n_positions"}, 1);
    of['d'] = get({"head_dim"}, family.head_dim > 0 ? family.head_dim : of['h'] / heads);
    if (of['d'] == 0) get({"head_dim"});  // more heads than values
    of['q'] = heads * of['d'];
    of['k'] = get({"num_key_value_heads"}, heads) * of['d'];
    of['a'] = of['q'] + 2 * of['k'];
    of['f'] = get({"intermediate_size", "n_inner"},
                  config.contains("n_embd") ? std::optional(4 * of['h']) : std::nullopt);
    if (family.has(" e ")) of['e'] = get({"num_experts", "num_local_experts"});
    of['m'] = get({"moe_intermediate_size"}, of['f']);
  }

  std::int64_t get(std::initializer_list<const char*> keys,
                   std::optional<std::int64_t> otherwise = {},
                   std::int64_t most = kNumberMax) const {
    for (const char* const key : keys) {
      const Json value = config_.value(key, Json());
      if (value.is_null()) continue;
      if (value.is_number_integer() && value > 0 && value <= most) return value.get<std::int64_t>();
      throw UsageError("{}: wanted a number from 1 to {}; found {}: path={}", key, most,
                       value.dump(), origin_);
    }
    if (otherwise) return *otherwise;
    throw UsageError("shapes follow from {}, which the configuration does not have: path={}",
                     *keys.begin(), origin_);
  }
  bool flag(const std::string& key, bool otherwise) const {
    const Json value = config_.value(key, Json());
    return value.is_boolean() ? value.get<bool>() : otherwise;
  }

  std::map<char, std::int64_t> of;

 private:
  const Json& config_;
  const std::string& origin_;
};

void append_rows(const std::string& prefix, const std::string& rows, const Numbers& numbers,
                 DType dtype, std::vector<plan::ParamSpec>& to) {
  std::istringstream lines(rows);
  for (std::string line; std::getline(lines, line, ';');) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    const bool bare = name.ends_with('=');
    name = prefix + name.substr(0, name.size() - (bare ? 1 : 0));
    plan::ParamSpec tensor{bare ? name : name + ".weight", {}, dtype};
    bool bias = false;
    for (std::string word; words >> word;) {
      const char first = word.front();
      if (first == '+' || first == '?')
        bias = word == "+" || numbers.flag(word.substr(1), first == '+');
      else
        tensor.shape.push_back((word.size() > 1 ? std::stoll(word) : 1) *
                               numbers.of.at(word.back()));
    }
    to.push_back(tensor);
    if (bias) to.push_back({name + ".bias", {tensor.shape.front()}, dtype});
  }
}

Activations activations_of(const Family& family, const Numbers& numbers, std::int64_t layers) {
  const auto width = [&](char letter) { return static_cast<double>(numbers.of.at(letter)); };
  Activations found;
  found.layers = static_cast<double>(layers);
  found.hidden = width('h');
  found.queries = width('q');
  found.keys = width('k');
  found.heads = numbers.of.at('q') / numbers.of.at('d');
  found.key_heads = numbers.of.at('k') / numbers.of.at('d');
  found.vocabulary = width('v');
  const double heads = found.queries + found.keys;
  const double norms =
      found.hidden * (family.has(kMlpNorms) ? 4 : 2) + (family.has("q_norm") ? heads : 0);
  const Activations::Values& norm = family.norm;
  found.attention = {norm.computed * norms + 2 * (found.hidden + heads), norm.in_fp32 * norms};
  found.norm = {(norm.computed + 1) * found.hidden, norm.in_fp32 * found.hidden};
  // Gradients need these values of a gate's operations, of a GELU in operations, of one GELU.
  const double copies = family.has("gate") ? 4 : family.has("c_fc") ? 5.5 : 2;
  const bool experts = numbers.of.contains('e');
  found.whole_mlp = experts || family.has("c_fc");
  found.mlp_width = width('f');
  if (experts)
    found.mlp_width = static_cast<double>(numbers.get({"num_experts_per_tok"})) * width('m');
  found.mlp.computed = copies * found.mlp_width;
  // Tokens are copied to each chosen expert, and back.
  if (experts) found.mlp.computed += 2 * found.hidden * found.mlp_width / width('m');
  return found;
}

}  // namespace

NamedModel decoder_names(const Json& config, const std::string& origin) {
  const Family& family = family_of(config, origin);
  const Numbers numbers(config, family, origin);
  if (!config.value("mlp_only_layers", Json()).empty() ||
      config.value("decoder_sparse_step", Json(1)) != 1)
    throw UsageError(
        "layers without experts among others with (mlp_only_layers, "
        "decoder_sparse_step) have no rules; give a folder with safetensors: path={}",
        origin);
  const std::int64_t layers = numbers.get({"num_hidden_layers", "n_layer"}, {}, kLayersMax);
  const Json own = config.value(config.contains("dtype") ? "dtype" : "torch_dtype", Json());
  const DType dtype = dtype_from_config(own.is_string() ? own.get<std::string>() : "float32")
                          .value_or(DType::kFloat32);
  NamedModel names{{},
                   numbers.flag("tie_word_embeddings", family.tied),
                   true,
                   activations_of(family, numbers, layers),
                   {"no weights were read: shapes follow from the configuration, with a head for "
                    "language modelling"}};
  const auto append = [&](const std::string& prefix, const std::string& rows) {
    append_rows(prefix, rows, numbers, dtype, names.params);
  };
  append("", family.before);
  for (std::int64_t layer = 0; layer < layers; ++layer)
    append(fmt::format("{}.{}.", family.layers, layer), family.block);
  append("", family.after);
  if (names.tied_head) names.params.pop_back();
  double elements = 0;
  for (const plan::ParamSpec& tensor : names.params)
    elements += std::accumulate(tensor.shape.begin(), tensor.shape.end(), 1.0, std::multiplies<>());
  if (elements > kElementsMax)
    throw UsageError("no model has the {:.3g} parameters of this configuration: path={}", elements,
                     origin);
  return names;
}

std::vector<std::pair<std::string, Json>> shipped_models() {
  std::vector<std::pair<std::string, Json>> models;
  std::istringstream lines(kShipped);
  std::string name;
  for (std::string type; lines >> name >> type;) {
    Json config{{"model_type", type}, {"dtype", "bfloat16"}, {"n_positions", 1024}};
    for (const char* const key : {"hidden_size", "intermediate_size", "num_hidden_layers",
                                  "num_attention_heads", "num_key_value_heads", "head_dim",
                                  "vocab_size", "tied", "num_experts", "num_experts_per_tok"}) {
      std::int64_t number = 0;
      lines >> number;
      if (number > 0) config[key] = number;
    }
    config["tie_word_embeddings"] = config.contains("tied");
    models.emplace_back(name, config);
  }
  return models;
}

}  // namespace strata::cli

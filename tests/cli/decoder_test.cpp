// A model without its files: its parameters by the numbers of its configuration. Names and shapes
// of every architecture are compared with transformers' in tests/python/test_sizing.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "strata/base/error.h"
#include "strata/cli/named_model.h"

namespace strata::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Json = nlohmann::json;

std::int64_t elements_of(const NamedModel& names) {
  std::int64_t sum = 0;
  for (const plan::ParamSpec& tensor : names.params) {
    std::int64_t product = 1;
    for (const std::int64_t size : tensor.shape) product *= size;
    sum += product;
  }
  return sum;
}

Json llama() {
  return {{"model_type", "llama"},   {"hidden_size", 64},        {"intermediate_size", 128},
          {"num_hidden_layers", 2},  {"num_attention_heads", 4}, {"vocab_size", 100},
          {"torch_dtype", "float16"}};
}

std::string refusal_of(const Json& config) {
  try {
    decoder_names(config, "here");
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(Decoder, WellKnownModelsHaveTheirNumberOfParameters) {
  const std::map<std::string, std::int64_t> known{{"GPT2", 124'439'808},
                                                  {"Qwen3-0.6B", 596'049'920},
                                                  {"Llama-3.2-1B", 1'235'814'400},
                                                  {"Llama-3.2-3B", 3'212'749'824},
                                                  {"Qwen3-1.7B", 1'720'574'976},
                                                  {"Qwen3-4B", 4'022'468'096},
                                                  {"Qwen2.5-7B", 7'615'616'512},
                                                  {"Mistral-7B-v0.3", 7'248'023'552},
                                                  {"Qwen3-8B", 8'190'735'360},
                                                  {"Llama-3.1-8B", 8'030'261'248},
                                                  {"Gemma-2-9B", 9'241'705'984},
                                                  {"Qwen3-14B", 14'768'307'200},
                                                  {"Qwen3-32B", 32'762'123'264},
                                                  {"Qwen3-30B-A3B", 30'532'122'624},
                                                  {"Mixtral-8x7B", 46'702'792'704},
                                                  {"Llama-3.1-70B", 70'553'706'496}};
  EXPECT_EQ(shipped_models().size(), known.size());
  for (const auto& [name, config] : shipped_models())
    EXPECT_EQ(elements_of(decoder_names(config, name)), known.at(name)) << name;
}

TEST(Decoder, FollowsTheConfiguration) {
  const NamedModel names = decoder_names(llama(), "here");
  EXPECT_EQ(names.params.size(), 1U + 2 * 9 + 2);
  EXPECT_EQ(names.params[1].name, "model.layers.0.self_attn.q_proj.weight");
  EXPECT_EQ(names.params.front().dtype, DType::kFloat16);
  EXPECT_FALSE(names.tied_head);
  Json more = llama();
  more["attention_bias"] = true;
  more["tie_word_embeddings"] = true;
  EXPECT_EQ(decoder_names(more, "here").params.size(), 1U + 2 * 13 + 1);
}

TEST(Decoder, CheckpointingKeepsLess) {
  const Activations model = *decoder_names(llama(), "here").activations;
  const auto of_token = [&](DType dtype, bool checkpointing) {
    ActivationSettings settings;
    settings.dtype = dtype;
    settings.checkpointing = checkpointing;
    return activation_bytes(model, settings, 1, {}).total();
  };
  // The inputs of two layers, and one block in backward, which is more than the logits here.
  EXPECT_EQ(of_token(DType::kBFloat16, true).value,
            2 * 64 * 2 + 2 * (2 * 64 + 2 * (64 + 64 + 64) + 4 * 128) + 4 * 2 * 64 +
                2 * (2 * 128 + 2 * 64));
  EXPECT_GT(of_token(DType::kBFloat16, false), of_token(DType::kBFloat16, true));
  EXPECT_GT(of_token(DType::kFloat32, false), of_token(DType::kBFloat16, false));
}

TEST(Decoder, SaysWhatIsWrong) {
  const auto with = [](const char* key, const Json& value) {
    Json config = llama();
    config[key] = value;
    return refusal_of(config);
  };
  EXPECT_THAT(with("model_type", "t5"),
              AllOf(HasSubstr("llama mistral"), HasSubstr("a folder with safetensors"),
                    HasSubstr("Found \"t5\""), HasSubstr("path=here")));
  EXPECT_THAT(with("vocab_size", nullptr), HasSubstr("shapes follow from vocab_size"));
  EXPECT_THAT(with("hidden_size", -1), HasSubstr("wanted a number from 1 to 1000000; found -1"));
  EXPECT_THAT(with("hidden_size", "64"), HasSubstr("found \"64\""));
  EXPECT_THAT(with("num_hidden_layers", 10'001), HasSubstr("from 1 to 10000"));
  EXPECT_THAT(with("num_attention_heads", 65), HasSubstr("head_dim"));
  EXPECT_THAT(with("mlp_only_layers", {1}), HasSubstr("layers without experts"));
  EXPECT_THAT(refusal_of(Json()), HasSubstr("Found null"));
  Json large = llama();
  large["hidden_size"] = large["intermediate_size"] = 1'000'000;
  large["num_hidden_layers"] = 10'000;
  EXPECT_THAT(refusal_of(large), HasSubstr("no model has the"));
}

}  // namespace
}  // namespace strata::cli

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "format/raw_safetensors.h"
#include "io/temporary_folder.h"
#include "strata/format/checkpoint_index.h"

namespace strata::testing {
namespace {

using format::SafetensorsHeader;
using ::testing::ElementsAre;

SafetensorsHeader parse(std::string_view json, std::size_t data_bytes) {
  return format::parse_safetensors_header(json, Bytes(8 + json.size() + data_bytes), "memory");
}

TEST(SafetensorsFile, GivesTensorsInTheOrderOfTheirData) {
  const TemporaryFolder folder;
  const std::string json = R"({"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[8,20]},)"
                           R"("__metadata__":{"format":"pt"},)"
                           R"("a":{"data_offsets":[0,8],"shape":[],"dtype":"F64"}}   )";
  const std::string path = folder.write("m.safetensors", raw_safetensors(json, 20));
  format::SafetensorsFile opened(path);
  const format::SafetensorsFile file(std::move(opened));
  ASSERT_EQ(file.tensors().size(), 2U);
  EXPECT_EQ(file.tensors()[0].name, "a");
  EXPECT_EQ(file.tensors()[0].numel, Numel(1));
  EXPECT_EQ(file.tensors()[0].dtype, DType::kFloat64);
  const format::TensorInfo* b = find(file, "b");
  ASSERT_NE(b, nullptr);
  EXPECT_THAT(b->shape, ElementsAre(2, 3));
  EXPECT_EQ(b->dtype, DType::kBFloat16);
  EXPECT_EQ(b->numel, Numel(6));
  EXPECT_EQ(b->bytes, 12_B);
  EXPECT_EQ(b->offset, Bytes(8 + json.size() + 8));
  EXPECT_EQ(find(file, "c"), nullptr);
  EXPECT_EQ(find(file, ""), nullptr);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.file().size(), Bytes(8 + json.size() + 20));
}

TEST(SafetensorsFile, AcceptsAFileWithoutTensors) {
  EXPECT_TRUE(parse("{}", 0).tensors.empty());
  EXPECT_TRUE(parse("{ } \n\t\r ", 0).tensors.empty());
}

TEST(SafetensorsFile, ReadsPastWhatAnEntryHasBesides) {
  const SafetensorsHeader header =
      parse(R"({"a":{"x":{"y":[1,-2.5e3 ,{"z":null}],"":{}},"dtype":"U8","s":"]}","shape":[2],)"
            R"("t": true ,"u":[],"data_offsets":[0,2],"v":0}})",
            2);
  ASSERT_EQ(header.tensors.size(), 1U);
  EXPECT_EQ(header.tensors[0].bytes, 2_B);
}

TEST(SafetensorsFile, AcceptsEmptyTensorsBetweenOthers) {
  const SafetensorsHeader header =
      parse(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},)"
            R"("e":{"dtype":"F32","shape":[0,9223372036854775807],"data_offsets":[1,1]},)"
            R"("f":{"dtype":"F32","shape":[0],"data_offsets":[3,3]},)"
            R"("w":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}})",
            3);
  std::vector<std::string> names;
  for (const auto& tensor : header.tensors) names.push_back(tensor.name);
  EXPECT_THAT(names, ElementsAre("w", "e", "x", "f"));
}

TEST(SafetensorsFile, DecodesEveryEscapeOfANames) {
  const SafetensorsHeader header =
      parse(R"({"__metadata__":{"\"\\\/\b\f\n\r\t":"\u0041\u00e9\u20AC\ud83d\ude00",)"
            "\"\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\":\"\"}}",
            0);
  EXPECT_EQ(header.metadata.at("\"\\/\b\f\n\r\t"), "A\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80");
  EXPECT_EQ(header.metadata.at("\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80"), "");
}

TEST(SafetensorsFile, AcceptsEveryDtypeThatItNames) {
  for (int i = 0; i <= static_cast<int>(DType::kBool); ++i) {
    const DType dtype = static_cast<DType>(i);
    const std::string json =
        fmt::format(R"({{"t":{{"dtype":"{}","shape":[3],"data_offsets":[0,{}]}}}})",
                    safetensors_name_of(dtype), 3 * size_of(dtype).value);
    EXPECT_EQ(parse(json, 3 * size_of(dtype).size()).tensors.at(0).dtype, dtype);
  }
}

// A valid header with every part of the grammar in it, for mutation.
std::string seed_json() {
  return R"({"__metadata__":{"format":"pt","\u00e9\n":"\ud83d\ude00"},)"
         R"("w.0":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
         R"("e":{"dtype":"I64","shape":[0],"data_offsets":[24,24]},)"
         R"("w.1":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}  )";
}

std::string mutated(std::string text, std::mt19937& random) {
  static constexpr std::string_view kBytes = "\"\\{}[]:,0123456789-.eu \n\x80\xFF\0aF";
  const auto below = [&random](std::size_t n) { return static_cast<std::size_t>(random()) % n; };
  for (std::size_t edits = 1 + below(4); edits > 0 && !text.empty(); --edits) {
    const std::size_t at = below(text.size());
    const char byte = kBytes[below(kBytes.size())];
    switch (below(5)) {
      case 0:
        text[at] = byte;
        break;
      case 1:
        text.insert(at, 1, byte);
        break;
      case 2:
        text.erase(at, 1 + below(4));
        break;
      case 3:
        text.insert(below(text.size()), text.substr(at, below(30)));
        break;
      default:
        text.resize(at);
        break;
    }
  }
  return text;
}

// The reader refuses arbitrary bytes with a message, or every tensor lies within the file and all
// together cover the data.
void expect_refused_or_sound(const std::string& content, const std::string& path) {
  try {
    const auto start =
        std::as_bytes(std::span(content)).first(std::min<std::size_t>(8, content.size()));
    const Bytes length = format::safetensors_header_bytes(start, Bytes(content.size()), path);
    const SafetensorsHeader header = format::parse_safetensors_header(
        std::string_view(content).substr(8, length.size()), Bytes(content.size()), path);
    Bytes covered;
    for (const auto& tensor : header.tensors) {
      ASSERT_LE((tensor.offset + tensor.bytes).size(), content.size());
      ASSERT_EQ(tensor.bytes, bytes_of(tensor.numel, tensor.dtype));
      covered += tensor.bytes;
    }
    ASSERT_EQ(covered + Bytes(8) + length, Bytes(content.size()));
  } catch (const FormatError& error) {
    ASSERT_THAT(error.what(), ::testing::HasSubstr("path=memory"));
  }
}

TEST(SafetensorsFile, NoMutationOfAHeaderCrashesOrSlipsThroughUnsound) {
  std::mt19937 random(20261121);
  for (int round = 0; round < 60000; ++round) {
    const std::string json = mutated(seed_json(), random);
    ASSERT_NO_FATAL_FAILURE(expect_refused_or_sound(raw_safetensors(json, 32), "memory"))
        << "round " << round;
  }
}

TEST(SafetensorsFile, NoMutationOfAWholeFileCrashesOrSlipsThroughUnsound) {
  std::mt19937 random(77);
  for (int round = 0; round < 20000; ++round) {
    const std::string content = mutated(raw_safetensors(seed_json(), 32), random);
    ASSERT_NO_FATAL_FAILURE(expect_refused_or_sound(content, "memory")) << "round " << round;
  }
}

TEST(SafetensorsFile, EveryTruncationIsRefused) {
  const std::string whole = raw_safetensors(seed_json(), 32);
  const TemporaryFolder folder;
  EXPECT_NO_THROW(format::SafetensorsFile(folder.write("whole", whole)));
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    const std::string path = folder.write("cut", std::string_view(whole).substr(0, bytes));
    ASSERT_THROW(format::SafetensorsFile file(path), FormatError) << bytes;
  }
}

}  // namespace
}  // namespace strata::testing

// The manifest of a training checkpoint: a written one is read back unchanged, and a damaged one is
// refused.
#include "strata/format/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "strata/base/error.h"

namespace strata::format {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

BlockChecksums sums_of(Bytes bytes) {
  BlockChecksums sums;
  const std::vector<std::byte> zeroes(bytes.size());
  sums.set(Bytes(), zeroes);
  return sums;
}

// Two ranks, of a tied weight and a buffer.
Manifest example() {
  Manifest manifest;
  manifest.tag = "global_step5";
  manifest.world_size = 2;
  manifest.stage = 3;
  manifest.training = R"({"global_steps":5,"lr":0.001})";
  manifest.kinds = {"value", "exp_avg"};
  manifest.tensors = {{"w", TensorRole::kParameter, {3, 2}, DType::kBFloat16, true, {"head"}},
                      {"mean", TensorRole::kBuffer, {2}, DType::kInt64, false, {}}};
  manifest.files = {{"model-0.safetensors", 64_B, sums_of(64_B)},
                    {"model-1.safetensors", 64_B, sums_of(64_B)}};
  const auto f32 = DType::kFloat32;
  manifest.extents = {{0, 0, f32, 0, 0_B, Numel(0), Numel(4)},
                      {0, 1, f32, 0, 16_B, Numel(0), Numel(4)},
                      {1, 0, DType::kInt64, 0, 48_B, Numel(0), Numel(2)},
                      {0, 0, f32, 1, 8_B, Numel(4), Numel(6)},
                      {0, 1, f32, 1, 16_B, Numel(4), Numel(6)}};
  return manifest;
}

std::string error_of(const std::string& text) {
  try {
    parse_manifest(text, "dir/tag/manifest.json");
  } catch (const FormatError& error) {
    EXPECT_THAT(error.what(), HasSubstr("dir/tag/manifest.json"));
    return error.what();
  }
  return "no error";
}

TEST(Manifest, ReadsWhatItWrites) {
  const Manifest wrote = example();
  const Manifest read = parse_manifest(to_text(wrote), "m");
  EXPECT_EQ(read.tag, wrote.tag);
  EXPECT_EQ(read.world_size, 2);
  EXPECT_EQ(read.stage, 3);
  EXPECT_EQ(read.training, wrote.training);
  EXPECT_EQ(read.kinds, wrote.kinds);
  EXPECT_EQ(read.tensors, wrote.tensors);
  EXPECT_EQ(read.extents, wrote.extents);
  ASSERT_EQ(read.files.size(), 2U);
  EXPECT_EQ(read.files[1].name, "model-1.safetensors");
  EXPECT_EQ(read.files[1].checksums.sums(), wrote.files[1].checksums.sums());
}

TEST(Manifest, SaysOfEveryFlippedByteThatItIsNotWhatWasWritten) {
  const std::string text = to_text(example());
  for (std::size_t i = 0; i + 1 < text.size(); ++i) {
    std::string flipped = text;
    flipped[i] = static_cast<char>(flipped[i] ^ 1);
    EXPECT_NE(error_of(flipped), "no error") << "byte " << i;
  }
  for (std::size_t i = 0; i + 1 < text.size(); i += 7)
    EXPECT_NE(error_of(text.substr(0, i)), "no error") << "cut at " << i;
}

TEST(Manifest, RefusesANewerFormatByItsNumber) {
  std::string text = to_text(example());
  text.replace(text.find("\"version\":1"), 11, "\"version\":3");
  EXPECT_THAT(error_of(text), HasSubstr("wanted format version 2, found 3"));
}

TEST(Manifest, BelievesNothing) {
  const std::vector<std::pair<std::string, std::function<void(Manifest&)>>> lies = {
      {"are not among its 6", [](Manifest& m) { m.extents[3].end = Numel(7); }},
      {"elements twice or a hole at 3",
       [](Manifest& m) {
         m.extents[3].begin = Numel(3);
         m.extents[3].offset = 0_B;
       }},
      {"elements twice or a hole at 4",
       [](Manifest& m) {
         m.extents[3].begin = Numel(5);
         m.extents[3].offset = 4_B;
       }},
      {"do not fit file", [](Manifest& m) { m.extents[4].offset = 60_B; }},
      {"do not fit file", [](Manifest& m) { m.extents[4].offset = 18_B; }},
      {"overlap in file", [](Manifest& m) { m.extents[1].offset = 12_B; }},
      {"ends at element 4", [](Manifest& m) { m.extents.pop_back(); }},
      {"has no values", [](Manifest& m) { m.extents.erase(m.extents.begin() + 2); }},
      {"a tensor, kind or file that is not there", [](Manifest& m) { m.extents[0].file = 9; }},
      {"a tensor, kind or file that is not there", [](Manifest& m) { m.extents[0].kind = 2; }},
      {"outside of the folder", [](Manifest& m) { m.files[0].name = "../model"; }},
      {"outside of the folder", [](Manifest& m) { m.files[0].name = m.files[1].name; }},
      {"'w' is there twice", [](Manifest& m) { m.tensors[1] = m.tensors[0]; }},
      {"no possible shape", [](Manifest& m) { m.tensors[0].shape = {-1}; }},
      {"no possible shape",
       [](Manifest& m) {
         m.tensors[0].shape = {INT64_MAX, 8};
       }},
      {"first kind is not 'value'", [](Manifest& m) { m.kinds[0] = "master"; }},
      {"1 checksums", [](Manifest& m) { m.files[0].bytes = 2_MiB; }},
      {"a world size of 0", [](Manifest& m) { m.world_size = 0; }},
  };
  for (const auto& [words, lie] : lies) {
    Manifest manifest = example();
    lie(manifest);
    EXPECT_THAT(error_of(to_text(manifest)), HasSubstr(words));
  }
}

TEST(Manifest, RefusesToNestDeeperThanAStackGoes) {
  const auto nested = [](std::size_t levels) {
    return R"({"[":"\\\"[",")" + std::string("a\":") + std::string(levels, '[') +
           std::string(levels, ']') + "}";
  };
  Manifest manifest = example();
  manifest.training = nested(250);
  EXPECT_EQ(parse_manifest(to_text(manifest), "m").tag, manifest.tag);
  manifest.training = nested(300);
  EXPECT_THROW(to_text(manifest), UsageError);
  EXPECT_THAT(error_of(R"({"format":"strata-checkpoint","version":1,"checksum":"00","training":)" +
                       nested(1'000'000) + "}"),
              HasSubstr("nest deeper than 256"));
}

TEST(Manifest, NamesWhatAByteBelongsTo) {
  const Manifest manifest = example();
  EXPECT_THAT(owners_of(manifest, 0, 20_B, 21_B), ElementsAre("tensor 'w' (exp_avg)"));
  EXPECT_THAT(owners_of(manifest, 0, 31_B, 56_B),
              ElementsAre("tensor 'w' (exp_avg)", "tensor 'mean' (value)"));
  EXPECT_THAT(owners_of(manifest, 1, 0_B, 8_B), IsEmpty());
}

TEST(BlockChecksums, DifferInTheBlockThatChanged) {
  std::vector<std::byte> bytes((3_MiB).size() + 5, std::byte{7});
  BlockChecksums sums;
  sums.set(1_MiB, std::span(bytes).subspan((1_MiB).size()));
  sums.set(Bytes(), std::span(bytes).first((1_MiB).size()));
  EXPECT_TRUE(sums.fits(Bytes(bytes.size())));
  EXPECT_FALSE(sums.fits(3_MiB));
  BlockChecksums again;
  again.set(Bytes(), bytes);
  EXPECT_EQ(again.sums(), sums.sums());
  bytes[(2_MiB).size() + 9] = std::byte{8};
  again.set(Bytes(), bytes);
  for (std::size_t block = 0; block < 4; ++block)
    EXPECT_EQ(again.sums()[block] == sums.sums()[block], block != 2) << block;
}

TEST(BlockChecksums, BlocksGrowWithTheFile) {
  EXPECT_EQ(BlockChecksums::block_for(Bytes()), 1_MiB);
  EXPECT_EQ(BlockChecksums::block_for(60_GiB), 1_MiB);
  EXPECT_EQ(BlockChecksums::block_for(1024_GiB), 32_MiB);
}

}  // namespace
}  // namespace strata::format

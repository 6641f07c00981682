// `strata consolidate`: it writes the trained weights, and on an error it leaves OUT unchanged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "cli/command_run.h"
#include "cli/saved_checkpoint.h"
#include "strata/base/error.h"
#include "strata/cli/commands.h"
#include "strata/format/checkpoint_index.h"
#include "strata/io/pending_range.h"
#include "strata/kernels/elementwise.h"

namespace strata::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

namespace fs = std::filesystem;

class Consolidate : public ::testing::Test {
 protected:
  Consolidate() : manifest_(saved_.write(folder_.path())) {}

  // The values of a tensor of OUT, in fp32.
  std::vector<float> values(const std::string& name, DType wanted) const {
    const format::CheckpointIndex index(out_);
    const format::CheckpointTensor* tensor = index.find(name);
    if (tensor == nullptr) return {};
    EXPECT_EQ(tensor->info.dtype, wanted) << name;
    std::vector<std::byte> bytes(tensor->info.bytes.size());
    io::read_fully(index.files()[tensor->file].file(), tensor->info.offset, bytes);
    std::vector<float> result(tensor->info.numel.size());
    kernels::cast(std::as_writable_bytes(std::span(result)).data(), DType::kFloat32, bytes.data(),
                  wanted, tensor->info.numel, nullptr);
    return result;
  }

  // The values that the checkpoint holds of the tensor, rounded once.
  std::vector<float> saved_values(const SavedTensor& tensor, DType dtype) const {
    const Numel numel = *format::checked_numel(tensor.shape);
    std::vector<float> values(numel.size());
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = saved_.value(tensor.name, 0, static_cast<std::int64_t>(i));
    std::vector<std::byte> rounded(bytes_of(numel, dtype).size());
    const auto bytes = std::as_writable_bytes(std::span(values));
    kernels::cast(rounded.data(), dtype, bytes.data(), DType::kFloat32, numel, nullptr);
    kernels::cast(bytes.data(), DType::kFloat32, rounded.data(), dtype, numel, nullptr);
    return values;
  }

  void expect_all(std::optional<DType> dtype) const {
    for (const SavedTensor& tensor : saved_.tensors) {
      if (tensor.dtype == DType::kInt64) continue;
      const DType wanted = dtype.value_or(tensor.dtype);
      EXPECT_EQ(values(tensor.name, wanted), saved_values(tensor, wanted)) << tensor.name;
    }
  }

  TestFolder folder_;
  SavedCheckpoint saved_;
  format::Manifest manifest_;
  std::string home_ = folder_ / "global_step10";
  std::string out_ = folder_ / "out";
};

TEST_F(Consolidate, WritesWhatWasTrained) {
  const CommandRun result = run({"consolidate", folder_.path(), out_});
  EXPECT_EQ(result.code, kDone) << result.err;
  expect_all(std::nullopt);
  const format::CheckpointIndex index(out_);
  EXPECT_EQ(index.tensors().size(), 5U);
  EXPECT_EQ(index.find("lm_head.weight"), nullptr);
  EXPECT_EQ(index.find("layers.10.steps")->info.dtype, DType::kInt64);
  EXPECT_EQ(index.files()[0].metadata().at("format"), "pt");
  EXPECT_THAT(result.out, AllOf(HasSubstr("5 tensors of 69 elements"),
                                HasSubstr("'lm_head.weight' is tied to 'embed.weight'"),
                                HasSubstr("put the model's beside the weights")));
}

TEST_F(Consolidate, LeavesOutWhatIsOfOneRankOrTheScripts) {
  saved_.tensors.push_back(
      {"1:layers.10.steps", {2}, DType::kInt64, false, {}, format::TensorRole::kRankBuffer});
  saved_.tensors.push_back({"noise", {4}, DType::kFloat32, false, {}, format::TensorRole::kClient});
  saved_.training = R"({"without_frozen":true})";
  saved_.write(folder_.path());
  const CommandRun result = run({"consolidate", home_, out_});
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("5 tensors"), HasSubstr("frozen parameters were not saved")));
  EXPECT_EQ(format::CheckpointIndex(out_).tensors().size(), 5U);
  EXPECT_EQ(run({"diff", home_, out_}).code, kDone);
  EXPECT_THAT(run({"diff", home_, home_, "--kinds"}).out, HasSubstr("13 tensors compared"));
  EXPECT_THAT(run({"inspect", home_}).out,
              AllOf(HasSubstr("frozen ones not saved"), HasSubstr("of ranks     1 of 2 elements")));
}

TEST_F(Consolidate, Casts) {
  for (const auto& [word, dtype] : {std::pair("fp32", DType::kFloat32),
                                    {"bf16", DType::kBFloat16},
                                    {"fp16", DType::kFloat16}}) {
    EXPECT_EQ(run({"consolidate", home_, out_, "--dtype", word}).code, kDone);
    expect_all(dtype);
  }
}

TEST_F(Consolidate, GivesTheSameBytesInPiecesOfAnySize) {
  std::ostringstream none;
  Console console{none, none};
  for (const bool verify : {true, false}) {
    for (const Bytes buffer : {32_B, 48_B, 80_B}) {
      const ConsolidationRequest request{
          .path = home_, .out = out_, .verify = verify, .ring = {2, buffer}};
      const auto ledger = std::make_shared<memory::Ledger>();
      const Report report = consolidate(request, ledger, console);
      expect_all(std::nullopt);
      EXPECT_EQ(report.json["staging_bytes"],
                (checkpoint::TransferRing::room(request.ring) * 2).value);
      EXPECT_EQ(ledger->held(memory::Tier::kHost), Bytes());
    }
  }
}

TEST_F(Consolidate, HoldsItsRingsAndNoMore) {
  const auto json = run({"consolidate", home_, out_, "--json"}).json();
  EXPECT_EQ(json["staging_bytes"], (64_MiB).value);
  EXPECT_EQ(json["tied"]["lm_head.weight"], "embed.weight");
}

TEST_F(Consolidate, CutsShardsAndCopiesTheModelsFiles) {
  write_text(home_ + "/config.json", R"({"architectures":["X"]})");
  write_text(folder_ / "secret.json", "s");
  fs::create_symlink(folder_ / "secret.json", home_ + "/secret.json");
  const auto json = run({"consolidate", home_, out_, "--max-shard", "64B", "--json"}).json();
  EXPECT_THAT(json["copied"], ElementsAre("config.json"));
  EXPECT_EQ(json["files"].size(), 3U);
  EXPECT_EQ(read_text(out_ + "/config.json"), R"({"architectures":["X"]})");
  expect_all(std::nullopt);
}

TEST_F(Consolidate, ADamagedCheckpointLeavesOutAsItWas) {
  ASSERT_EQ(run({"consolidate", home_, out_}).code, kDone);
  const std::string before = read_text(out_ + "/model.safetensors");
  const auto& extent = manifest_.extents[1];
  const std::string tensor = fmt::format("tensor '{}' (value)", saved_.tensors[extent.tensor].name);
  flip_byte(home_ + "/" + manifest_.files[0].name, extent.offset.value);
  const CommandRun result = run({"consolidate", home_, out_, "--dtype", "fp32"});
  EXPECT_EQ(result.code, kFoundWrong);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("nothing was written"), HasSubstr("model-00000-of-00002.safetensors"),
                    HasSubstr(tensor), HasSubstr("is not what was written")));
  EXPECT_EQ(read_text(out_ + "/model.safetensors"), before);
  EXPECT_EQ(run({"consolidate", home_, out_, "--no-verify"}).code, kDone);
}

TEST_F(Consolidate, DamageInOptimizerStatesIsNoneOfItsBusiness) {
  flip_byte(home_ + "/" + manifest_.files[1].name, manifest_.files[1].bytes.value - 1);
  EXPECT_EQ(run({"consolidate", home_, out_}).code, kDone);
}

TEST_F(Consolidate, NeverWritesIntoATrainingCheckpoint) {
  const CommandRun result = run({"consolidate", home_, home_});
  EXPECT_EQ(result.code, kUsage);
  EXPECT_THAT(result.err, HasSubstr("OUT is a training checkpoint, whose files would be lost"));
  EXPECT_EQ(run({"inspect", home_, "--verify"}).code, kDone);
}

TEST_F(Consolidate, SaysWhatIsWrongWithItsArguments) {
  CommandRun result = run({"consolidate", home_, out_, "--dtype", "fp64"});
  EXPECT_EQ(result.code, kUsage);
  EXPECT_THAT(result.err,
              HasSubstr("--dtype: wanted bf16, fp16, fp32 or as-trained; found 'fp64'"));
  for (const char* size : {"5XB", "0GB", "-1GB", "many", "1e30TB", ""}) {
    result = run({"consolidate", home_, out_, "--max-shard", size});
    EXPECT_EQ(result.code, kUsage) << size;
    EXPECT_THAT(result.err, HasSubstr("--max-shard")) << size;
  }
  write_text(folder_ / "file", "x");
  result = run({"consolidate", home_, folder_ / "file"});
  EXPECT_EQ(result.code, kFoundWrong);
  EXPECT_THAT(result.err, HasSubstr("cannot make a folder"));
  EXPECT_EQ(run({"consolidate", folder_ / "gone", out_}).code, kUsage);
  EXPECT_FALSE(fs::exists(out_));
}

TEST_F(Consolidate, SaysThatAFileIsCutOff) {
  fs::resize_file(home_ + "/" + manifest_.files[2].name, 70);
  const CommandRun result = run({"consolidate", home_, out_});
  EXPECT_EQ(result.code, kFoundWrong);
  EXPECT_THAT(result.err, AllOf(HasSubstr("another size"), HasSubstr("model-00001-of-00002"),
                                HasSubstr("found=70")));
}

}  // namespace
}  // namespace strata::cli

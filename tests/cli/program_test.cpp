// The program itself, in a process of its own: it streams a model that is larger than the memory
// that it may have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>

#include "cli/saved_checkpoint.h"
#include "strata/base/error.h"
#include "strata/format/safetensors.h"

namespace strata::cli {
namespace {

// The exit code of a command; its output is in FOLDER/log.
int run_program(const TestFolder& folder, const std::string& arguments) {
  const std::string command =
      fmt::format("ulimit -d {} && exec {} {} > {} 2>&1", (256_MiB).value / 1024, STRATA_PROGRAM,
                  arguments, folder / "log");
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// One fp32 tensor of zeroes, which take no room on the disk.
void write_large(const std::string& folder, Numel numel) {
  const std::vector<format::TensorSpec> specs{{"w", DType::kFloat32, {numel.value}}};
  const auto layout = format::lay_out_safetensors(specs, {});
  std::filesystem::create_directories(folder);
  write_text(folder + "/model.safetensors", layout.head);
  std::filesystem::resize_file(folder + "/model.safetensors", layout.file_bytes.size());
  std::string block((1_MiB).size(), '\0');
  const std::uint64_t zeroes = format::checksum_of(std::as_bytes(std::span(block)));
  const auto blocks = static_cast<std::size_t>((layout.file_bytes.value + (1_MiB).value - 1) >> 20);
  std::vector<std::uint64_t> sums(blocks, zeroes);
  block.replace(0, layout.head.size(), layout.head);
  sums.front() = format::checksum_of(std::as_bytes(std::span(block)));
  const std::string tail((layout.file_bytes % 1_MiB).size(), '\0');
  if (!tail.empty()) sums.back() = format::checksum_of(std::as_bytes(std::span(tail)));
  format::Manifest manifest;
  manifest.tag = "large";
  manifest.kinds = {std::string(format::kValue)};
  manifest.tensors = {
      {"w", format::TensorRole::kParameter, {numel.value}, DType::kBFloat16, true, {}}};
  manifest.files = {{"model.safetensors", layout.file_bytes, format::BlockChecksums(1_MiB, sums)}};
  manifest.extents = {{0, 0, DType::kFloat32, 0, layout.tensors[0].offset, Numel(), numel}};
  write_text(folder + "/manifest.json", to_text(manifest));
}

TEST(Program, StreamsAModelThatIsLargerThanItsMemory) {
  const TestFolder folder;
  write_large(folder / "large", Numel((768_MiB).value / 4));
  EXPECT_EQ(run_program(folder, "inspect --verify " + folder / "large"), 0)
      << read_text(folder / "log");
  EXPECT_EQ(run_program(folder, fmt::format("consolidate {} {}", folder / "large", folder / "out")),
            0)
      << read_text(folder / "log");
  EXPECT_EQ(run_program(folder, fmt::format("diff {} {}", folder / "large", folder / "out")), 0)
      << read_text(folder / "log");
  EXPECT_EQ(std::filesystem::file_size(folder / "out/model.safetensors") >> 20, 384U);
}

TEST(Program, ExitsAsItSays) {
  const TestFolder folder;
  EXPECT_EQ(run_program(folder, "--version"), 0);
  EXPECT_EQ(run_program(folder, "inspect " + folder / "none"), 2);
  SavedCheckpoint().write(folder / "run");
  write_text(folder / "run/global_step10/model-00000-of-00002.safetensors", "");
  EXPECT_EQ(run_program(folder, "inspect " + folder / "run"), 1);
}

}  // namespace
}  // namespace strata::cli

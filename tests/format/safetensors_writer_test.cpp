#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "format/raw_safetensors.h"
#include "io/faulty_calls.h"
#include "io/temporary_folder.h"
#include "strata/format/checkpoint_index.h"
#include "strata/format/safetensors.h"
#include "strata/format/sharded_writer.h"
#include "strata/io/pending_range.h"
#include "strata/io/thread_engine.h"

namespace strata::testing {
namespace {

using format::ShardedWriter;
using format::TensorSpec;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

class Writer : public ::testing::Test {
 protected:
  std::string path() const { return folder_ / "model.safetensors"; }
  ShardedWriter begin(const format::Metadata& metadata = {}) {
    return {folder_.path(), specs_, engine_, {.metadata = metadata}};
  }

  TemporaryFolder folder_;
  std::shared_ptr<FaultyCalls> calls_ = std::make_shared<FaultyCalls>(5U);
  io::ThreadEngine engine_{{.piece = 64_B, .threads = 2, .queue_max = 8}, calls_};
  const std::vector<TensorSpec> specs_{{"bytes", DType::kUInt8, {5}},
                                       {"matrix", DType::kFloat32, {2, 3}},
                                       {"empty", DType::kInt64, {0, 4}}};
  const std::vector<std::byte> data_ = patterned_bytes(64, 1);
};

TEST_F(Writer, WritesWhatTheReaderReads) {
  auto writer = begin({{"format", "pt"}});
  writer.write(1, 0_B, std::span(data_).first(24))->wait();
  writer.write(0, 0_B, std::span(data_).subspan(30, 5))->wait();
  writer.finish();
  const format::SafetensorsFile file(path());
  EXPECT_EQ(file.metadata(), (format::Metadata{{"format", "pt"}}));
  ASSERT_EQ(file.tensors().size(), 3U);
  std::vector<std::byte> read(24);
  io::read_fully(file.file(), find(file, "matrix")->offset, read);
  EXPECT_TRUE(std::equal(read.begin(), read.end(), data_.begin()));
  read.resize(5);
  io::read_fully(file.file(), find(file, "bytes")->offset, read);
  EXPECT_TRUE(std::equal(read.begin(), read.end(), data_.begin() + 30));
  EXPECT_EQ(find(file, "empty")->numel, Numel(0));
  EXPECT_EQ(format::lay_out_safetensors(specs_, file.metadata()).tensors[1].offset,
            find(file, "matrix")->offset);
}

TEST_F(Writer, AlignsTheDataAndPutsWiderElementsFirst) {
  const auto layout = format::lay_out_safetensors(specs_, {});
  EXPECT_EQ(layout.head.size() % 64, 0U);
  EXPECT_EQ(layout.tensors[2].offset, Bytes(layout.head.size()));
  EXPECT_EQ(layout.tensors[1].offset, Bytes(layout.head.size()));
  EXPECT_EQ(layout.tensors[0].offset, Bytes(layout.head.size() + 24));
  EXPECT_EQ(layout.file_bytes, Bytes(layout.head.size() + 29));
}

TEST_F(Writer, AFileWithoutTensorsIsValid) {
  ShardedWriter(folder_.path(), {}, engine_).finish();
  EXPECT_THAT(format::SafetensorsFile(path()).tensors(), IsEmpty());
}

TEST_F(Writer, NothingIsVisibleBeforeTheEndAndNothingStaysWhenDropped) {
  folder_.write("model.safetensors", "old");
  {
    auto writer = begin();
    writer.write(1, 0_B, std::span(data_).first(24))->wait();
    EXPECT_EQ(content_of(path()), "old");
  }
  EXPECT_THAT(folder_.names(), UnorderedElementsAre("model.safetensors"));
  EXPECT_EQ(content_of(path()), "old");
}

TEST_F(Writer, FinishingTooEarlyNamesTheFirstMissingBytes) {
  auto writer = begin();
  writer.write(0, 0_B, std::span(data_).first(5))->wait();
  writer.write(1, 0_B, std::span(data_).first(8))->wait();
  writer.write(1, 12_B, std::span(data_).first(12))->wait();
  EXPECT_THAT(message_of<UsageError>([&] { writer.finish(); }),
              HasSubstr("tensor='matrix' begin=8 end=12 written=20 tensor_bytes=24"));
  writer.write(1, 8_B, std::span(data_).first(4))->wait();
  EXPECT_NO_THROW(writer.finish());
}

TEST_F(Writer, RefusesBytesThatAreWrittenTwiceOrDoNotFit) {
  auto writer = begin();
  writer.write(1, 4_B, std::span(data_).first(8))->wait();
  EXPECT_THAT(message_of<UsageError>([&] { writer.write(1, 8_B, std::span(data_).first(8)); }),
              HasSubstr("written twice: path=" + path() + " tensor='matrix' begin=8 end=12"));
  EXPECT_THAT(message_of<UsageError>([&] { writer.write(1, 20_B, std::span(data_).first(5)); }),
              HasSubstr("does not fit its tensor: path=" + path() +
                        " tensor='matrix' offset=20 bytes=5 tensor_bytes=24"));
  EXPECT_THROW(writer.write(0, Bytes(-1), std::span(data_).first(1)), UsageError);
  EXPECT_THROW(writer.write(2, 1_B, {}), UsageError);
}

TEST_F(Writer, AFailedWriteThatNobodyWaitedForStillStopsTheFile) {
  auto writer = begin();
  calls_->fail_at(format::lay_out_safetensors(specs_, {}).tensors[0].offset + 3_B, -ENOSPC);
  writer.write(1, 0_B, std::span(data_).first(24)).reset();
  writer.write(0, 0_B, std::span(data_).first(5)).reset();
  const std::string message = message_of<IoError>([&] { writer.finish(); });
  EXPECT_THAT(message, HasSubstr("wanted=5 got=3 errno=28"));
  EXPECT_FALSE(std::filesystem::exists(path()));
}

TEST_F(Writer, AFullDiskAtTheHeaderLeavesNoRest) {
  calls_->fail_at(Bytes(3), -ENOSPC);
  EXPECT_THAT(message_of<IoError>([&] { begin(); }), HasSubstr("errno=28"));
  EXPECT_THAT(folder_.names(), IsEmpty());
}

TEST_F(Writer, FinishingWithWritesUnderWayIsRefused) {
  auto writer = begin();
  const auto transfer = writer.write(1, 0_B, std::span(data_).first(24));
  EXPECT_THAT(message_of<UsageError>([&] { writer.finish(); }), HasSubstr("writes=1"));
  transfer->wait();
}

TEST_F(Writer, RefusesTensorsThatNoFileCanHold) {
  const auto message = [&](const std::vector<TensorSpec>& specs) {
    return message_of<UsageError>([&] { format::lay_out_safetensors(specs, {}); });
  };
  const TensorSpec tensor{"a", DType::kUInt8, {1}};
  EXPECT_THAT(message({tensor, tensor}), HasSubstr("tensor='a'"));
  EXPECT_THAT(message({{"__metadata__", DType::kUInt8, {1}}}), HasSubstr("'__metadata__'"));
  EXPECT_THAT(message({{"n", DType::kUInt8, {-1}}}), HasSubstr("tensor='n' shape=[-1]"));
  EXPECT_THAT(message({{"n", DType::kFloat64, {std::int64_t{1} << 61}}}), HasSubstr("63 bits"));
  EXPECT_THAT(message({{"n", DType::kUInt8, {std::int64_t{1} << 62}},
                       {"m", DType::kUInt8, {std::int64_t{1} << 62}}}),
              HasSubstr("together"));
  EXPECT_THAT(message({{"\xFF", DType::kUInt8, {1}}}), HasSubstr("not valid UTF-8"));
}

// Random tensors with awkward names, written in random pieces in random order under faults, are
// read back equal.
TEST_F(Writer, RoundTripsWhateverItIsGiven) {
  std::mt19937 random(99);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random()) % n; };
  for (int round = 0; round < 60; ++round) {
    std::vector<TensorSpec> specs(below(7));
    for (std::size_t i = 0; i < specs.size(); ++i) {
      specs[i].name = fmt::format("t\"\\\n\x01\xC3\xA9{}", i);
      specs[i].dtype = static_cast<DType>(below(15));
      for (std::size_t d = below(4); d > 0; --d) {
        specs[i].shape.push_back(static_cast<std::int64_t>(below(6)));
      }
    }
    const format::Metadata metadata{{"k\n", "\"v\""}};
    ShardedWriter writer(folder_.path(), specs, engine_, {.metadata = metadata});
    const auto layout = format::lay_out_safetensors(specs, metadata);
    struct Part {
      std::size_t tensor, begin, bytes;
    };
    std::vector<Part> parts;
    std::vector<std::vector<std::byte>> contents;
    for (std::size_t i = 0; i < specs.size(); ++i) {
      contents.push_back(patterned_bytes(layout.tensors[i].bytes.size(), static_cast<unsigned>(i)));
      for (std::size_t at = 0; at < contents[i].size();) {
        const std::size_t bytes = std::min(contents[i].size() - at, 1 + below(50));
        parts.push_back({i, at, bytes});
        at += bytes;
      }
    }
    std::shuffle(parts.begin(), parts.end(), random);
    std::vector<std::unique_ptr<io::Transfer>> transfers;
    for (const Part& part : parts) {
      transfers.push_back(
          writer.write(part.tensor, Bytes(part.begin),
                       std::span(contents[part.tensor]).subspan(part.begin, part.bytes)));
    }
    transfers.clear();
    writer.finish();
    const format::SafetensorsFile file(path());
    ASSERT_EQ(file.tensors().size(), specs.size());
    EXPECT_EQ(file.metadata().at("k\n"), "\"v\"");
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const format::TensorInfo* info = find(file, specs[i].name);
      ASSERT_NE(info, nullptr);
      ASSERT_EQ(info->shape, specs[i].shape);
      ASSERT_EQ(info->dtype, specs[i].dtype);
      ASSERT_EQ(info->offset.value % size_of(info->dtype).value, 0);
      std::vector<std::byte> read(contents[i].size());
      io::read_fully(file.file(), info->offset, read);
      ASSERT_EQ(read, contents[i]);
    }
  }
}

}  // namespace
}  // namespace strata::testing

#include "strata/format/checkpoint_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "format/raw_safetensors.h"
#include "io/temporary_folder.h"

namespace strata::testing {
namespace {

using format::CheckpointIndex;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// A file of one-byte tensors of these names.
std::string file_of(const std::vector<std::string>& names) {
  std::string json = "{";
  for (std::size_t i = 0; i < names.size(); ++i) {
    json += fmt::format(R"({}"{}":{{"dtype":"U8","shape":[1],"data_offsets":[{},{}]}})",
                        i == 0 ? "" : ",", names[i], i, i + 1);
  }
  return raw_safetensors(json + "}", names.size());
}

class Checkpoint : public ::testing::Test {
 protected:
  void write_index(const std::string& weight_map) {
    folder_.write("model.safetensors.index.json",
                  R"({"metadata":{"total_size":3},"weight_map":)" + weight_map + "}");
  }
  std::string refusal() const {
    return message_of<FormatError>([&] { CheckpointIndex index(folder_.path()); });
  }

  TemporaryFolder folder_;
};

TEST_F(Checkpoint, FindsTheTensorsOfASingleFile) {
  folder_.write("model.safetensors", file_of({"b", "a"}));
  for (const std::string& path : {folder_.path(), folder_ / "model.safetensors"}) {
    const CheckpointIndex index(path);
    ASSERT_EQ(index.tensors().size(), 2U);
    EXPECT_EQ(index.tensors()[0].info.name, "b");
    EXPECT_EQ(index.find("a")->info.offset, index.find("b")->info.offset + 1_B);
    EXPECT_EQ(index.find("c"), nullptr);
  }
}

TEST_F(Checkpoint, FindsTheFileOfEachTensorByTheIndex) {
  folder_.write("one.safetensors", file_of({"a", "c"}));
  std::filesystem::create_directories(folder_ / "part");
  folder_.write("part/two.safetensors", file_of({"b", "unlisted"}));
  write_index(R"({"a":"one.safetensors","b":"part/two.safetensors","c":"one.safetensors"})");
  const CheckpointIndex index(folder_.path());
  ASSERT_EQ(index.files().size(), 2U);
  EXPECT_EQ(index.tensors().size(), 3U);
  EXPECT_EQ(index.files()[index.find("b")->file].path(), folder_ / "part/two.safetensors");
  EXPECT_EQ(index.files()[index.find("c")->file].path(), folder_ / "one.safetensors");
  EXPECT_EQ(index.find("unlisted"), nullptr);
}

TEST_F(Checkpoint, AnIndexMayNameTensorsInAnyOrderBesideOtherThings) {
  folder_.write("2.safetensors", file_of({"c", "a"}));
  folder_.write("1.safetensors", file_of({"d", "b"}));
  folder_.write("model.safetensors.index.json",
                R"({"of":[[{"weight_map":{"x":1}}],null],"weight_map":{"d":"1.safetensors",)"
                R"("a":"2.safetensors","c":"2.safetensors","b":"1.safetensors"},"last":true})");
  const CheckpointIndex index(folder_.path());
  std::string by_place;
  for (const auto& tensor : index.tensors()) by_place += tensor.info.name;
  EXPECT_EQ(by_place, "dbca");  // by file, then by offset
  for (const char* name : {"a", "b", "c", "d"}) {
    const auto* tensor = index.find(name);
    ASSERT_NE(tensor, nullptr) << name;
    EXPECT_EQ(find(index.files()[tensor->file], name)->offset, tensor->info.offset) << name;
  }
}

TEST_F(Checkpoint, TheFirstOfManyFilesThatLieIsNamed) {
  std::string map;
  for (int i = 0; i < 20; ++i) {
    const std::string file = fmt::format("{:02}.safetensors", i);
    folder_.write(file, file_of({fmt::format("t{}", i)}) + (i == 7 || i == 13 ? "x" : ""));
    map += fmt::format(R"({}"t{}":"{}")", i == 0 ? "{" : ",", i, file);
  }
  write_index(map + "}");
  for (int turn = 0; turn < 10; ++turn)
    EXPECT_THAT(refusal(), HasSubstr("belong to no tensor: path=" + folder_ / "07.safetensors"));
}

TEST_F(Checkpoint, TakesTheSingleFileBeforeAnIndexAsTransformersDoes) {
  folder_.write("model.safetensors", file_of({"a"}));
  write_index(R"({"x":"absent.safetensors"})");
  EXPECT_NE(CheckpointIndex(folder_.path()).find("a"), nullptr);
}

TEST_F(Checkpoint, FollowsLinksAsDownloadCachesHaveThem) {
  const TemporaryFolder blobs;
  blobs.write("blob", file_of({"a"}));
  std::filesystem::create_symlink(blobs / "blob", folder_ / "model.safetensors");
  EXPECT_NE(CheckpointIndex(folder_.path()).find("a"), nullptr);
}

TEST_F(Checkpoint, SaysWhatAFolderWithoutOneLacks) {
  folder_.write("pytorch_model.bin", "x");
  EXPECT_THAT(refusal(), HasSubstr("wanted model.safetensors or model.safetensors.index.json"));
  EXPECT_THAT(message_of<FormatError>([&] { CheckpointIndex index(folder_ / "absent"); }),
              HasSubstr("no such file or folder: path=" + folder_ / "absent"));
}

TEST_F(Checkpoint, ListsTheFilesThatAreMissing) {
  folder_.write("s0.safetensors", file_of({"t0"}));
  std::string map = R"({"t0":"s0.safetensors")";
  for (int i = 10; i < 25; ++i) map += fmt::format(R"(,"t{0}":"s{0}.safetensors")", i);
  write_index(map + "}");
  EXPECT_THAT(refusal(), HasSubstr("missing=15 files='s10.safetensors', 's11.safetensors'"));
  EXPECT_THAT(refusal(), HasSubstr("'s19.safetensors' and 5 more"));
  EXPECT_THAT(refusal(), Not(HasSubstr("s20")));
}

TEST_F(Checkpoint, ALinkToNowhereIsAMissingFile) {
  std::filesystem::create_symlink(folder_ / "gone", folder_ / "s.safetensors");
  write_index(R"({"a":"s.safetensors"})");
  EXPECT_THAT(refusal(), HasSubstr("missing=1 files='s.safetensors'"));
}

TEST_F(Checkpoint, NamesTensorsThatTheirFileLacks) {
  folder_.write("one.safetensors", file_of({"a"}));
  folder_.write("two.safetensors", file_of({"b"}));
  write_index(R"({"a":"two.safetensors","b":"two.safetensors","x":"one.safetensors"})");
  EXPECT_THAT(refusal(), HasSubstr("missing=2 tensors='a' in 'two.safetensors', 'x' in "
                                   "'one.safetensors'"));
}

TEST_F(Checkpoint, RefusesATensorInTwoFiles) {
  folder_.write("one.safetensors", file_of({"a", "b"}));
  folder_.write("two.safetensors", file_of({"b"}));
  write_index(R"({"a":"one.safetensors","b":"two.safetensors"})");
  EXPECT_THAT(refusal(), HasSubstr("tensor='b' files=" + folder_ / "one.safetensors" + " and " +
                                   folder_ / "two.safetensors"));
}

TEST_F(Checkpoint, RefusesFilesOutsideOfTheFolder) {
  for (const char* file : {"../up.safetensors", "/etc/passwd", "a/../../b.safetensors", "", ".",
                           "a/", "..", "./a.safetensors", "a\\u0000b"}) {
    write_index(fmt::format(R"({{"t":"{}"}})", file));
    EXPECT_THAT(refusal(), HasSubstr("names a file outside of its folder")) << file;
    EXPECT_THAT(refusal(), HasSubstr("tensor='t'")) << file;
  }
}

TEST_F(Checkpoint, RefusesAnIndexThatIsNotOne) {
  const auto with_text = [&](std::string_view text) {
    folder_.write("model.safetensors.index.json", text);
    return refusal();
  };
  EXPECT_THAT(with_text(""), HasSubstr("not valid JSON"));
  EXPECT_THAT(with_text("{\"weight_map\":{}"), HasSubstr("not valid JSON"));
  EXPECT_THAT(with_text(""), HasSubstr("not valid JSON"));
  EXPECT_THAT(with_text("[]"), HasSubstr("no object 'weight_map'"));
  EXPECT_THAT(with_text(R"({"weight_map":{}})"),
              AllOf(HasSubstr("is empty"), HasSubstr("model.safetensors.index.json")));
  EXPECT_THAT(with_text("{}"), HasSubstr("no object 'weight_map'"));
  EXPECT_THAT(with_text(R"({"weight_map":[]})"), HasSubstr("no object 'weight_map'"));
  EXPECT_THAT(with_text(R"({"weight_map":"t","of":{"weight_map":{"t":"a"}}})"),
              HasSubstr("no object 'weight_map'"));
  EXPECT_THAT(with_text(R"([{"weight_map":{"t":"a"}}])"), HasSubstr("no object 'weight_map'"));
  const std::pair<const char*, const char*> kinds[] = {
      {"1", "number"},     {"-1", "number"}, {"0.5", "number"},         {"null", "null"},
      {"true", "boolean"}, {"[]", "array"},  {R"({"u":"a"})", "object"}};
  for (const auto& [value, kind] : kinds) {
    EXPECT_THAT(with_text(fmt::format(R"({{"weight_map":{{"t":{}}}}})", value)),
                HasSubstr(fmt::format("tensor='t' wanted=a string found={}", kind)));
  }
  EXPECT_THAT(
      with_text(R"({"weight_map":{"t":"a","s":"b","t":"b"}})"),
      HasSubstr("a key twice: path=" + folder_ / "model.safetensors.index.json" + " key='t'"));
  EXPECT_THAT(with_text(R"({"metadata":{"of":[{"k":1,"k":1}]},"weight_map":{}})"),
              HasSubstr("key='k'"));
  EXPECT_THAT(with_text(R"({"weight_map":{},"weight_map":{}})"), HasSubstr("key='weight_map'"));
  EXPECT_THAT(with_text(std::string(200000, '[')), HasSubstr("not valid JSON"));
}

TEST_F(Checkpoint, RefusesAnIndexLargerThanAnyMayBe) {
  folder_.write("model.safetensors.index.json", "{}");
  std::filesystem::resize_file(folder_ / "model.safetensors.index.json", 100'000'001);
  EXPECT_THAT(refusal(), HasSubstr("found=100000001 max=100000000"));
}

TEST_F(Checkpoint, ALieInOneOfItsFilesNamesThatFile) {
  folder_.write("one.safetensors", file_of({"a"}) + "x");
  write_index(R"({"a":"one.safetensors"})");
  EXPECT_THAT(refusal(), HasSubstr("belong to no tensor: path=" + folder_ / "one.safetensors"));
}

}  // namespace
}  // namespace strata::testing

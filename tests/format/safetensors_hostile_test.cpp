// One case for every way in which a safetensors file can lie; each has a message of its own, which
// names the file, and the tensor where there is one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "format/raw_safetensors.h"
#include "io/temporary_folder.h"
#include "strata/format/checkpoint_index.h"

namespace strata::testing {
namespace {

struct Lie {
  const char* name;
  std::string content;
  std::vector<std::string> message;  // parts, all of which must be there
};

std::ostream& operator<<(std::ostream& out, const Lie& lie) {
  return out << lie.name;
}

class HostileSafetensors : public ::testing::TestWithParam<Lie> {};

TEST_P(HostileSafetensors, IsRefusedWithItsOwnMessage) {
  const TemporaryFolder folder;
  const std::string path = folder.write("lie.safetensors", GetParam().content);
  const std::string message = message_of<FormatError>([&] { format::SafetensorsFile file(path); });
  EXPECT_THAT(message, ::testing::HasSubstr("path=" + path));
  for (const std::string& part : GetParam().message) {
    EXPECT_THAT(message, ::testing::HasSubstr(part));
  }
}

std::string name_of_lie(const ::testing::TestParamInfo<Lie>& info) {
  return info.param.name;
}

// A header with one tensor 'a' of this entry, and as many bytes of data.
std::string one(std::string_view entry, std::size_t data_bytes) {
  return raw_safetensors(R"({"a":)" + std::string(entry) + "}", data_bytes);
}

std::string two(std::string_view first_offsets, std::string_view second_offsets,
                std::size_t data_bytes) {
  return raw_safetensors(
      R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + std::string(first_offsets) +
          R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + std::string(second_offsets) + "}}",
      data_bytes);
}

std::string ones(std::size_t count) {
  std::string text = "1";
  for (std::size_t i = 1; i < count; ++i) text += ",1";
  return text;
}

const Lie kLengthLies[] = {
    {"Empty", "", {"shorter than the length of a header", "wanted=8 found=0"}},
    {"SevenBytes", "1234567", {"shorter than the length of a header", "found=7"}},
    {"HeaderOfATerabyte",
     length_field(1ULL << 40U) + std::string(92, ' '),
     {"header longer than any may be", "claimed=1099511627776", "file_bytes=100"}},
    {"HeaderOfAllOnes",
     length_field(~0ULL) + "{}",
     {"longer than any may be", "claimed=18446744073709551615"}},
    {"HeaderLongerThanTheFile",
     length_field(3) + "{}",
     {"header longer than itself", "claimed=3 file_bytes=10"}},
    {"HeaderOfNothing", length_field(0), {"does not begin with '{'"}},
    {"NotSafetensors", "PK\3\4" + std::string(100, 'x'), {"longer than any may be"}},
};

const Lie kJsonLies[] = {
    {"SpaceBeforeTheBrace", raw_safetensors(" {}", 0), {"does not begin with '{'"}},
    {"AnArrayAtTheTop", raw_safetensors("[]", 0), {"does not begin with '{'"}},
    {"NoClosingBrace",
     raw_safetensors("{", 0),
     {"object key - unexpected end of input", "header_byte=0"}},
    {"TextAfterTheObject", raw_safetensors("{}{}", 0), {"'{' follows its end", "header_byte=2"}},
    {"ZeroByteAfterTheObject",
     raw_safetensors(std::string_view("{}\0", 3), 0),
     {R"('\x00' follows its end)"}},
    {"TrailingComma",
     raw_safetensors(R"({"__metadata__":{},})", 0),
     {"object key - unexpected '}'"}},
    {"MissingComma",
     raw_safetensors(R"({"__metadata__":{"a":"b" "c":"d"}})", 0),
     {"object - unexpected string literal; expected '}'"}},
    {"MissingColon",
     raw_safetensors(R"({"a" {}})", 0),
     {"object separator - unexpected '{'; expected ':'"}},
    {"UnquotedKey", raw_safetensors("{a:1}", 0), {"object key - invalid literal"}},
    {"DeepNesting",
     raw_safetensors("{\"a\":" + std::string(100000, '['), 0),
     {"wanted a tensor's entry in braces, found array", "header_byte=5"}},
    {"StringWithoutEnd", raw_safetensors(R"({"abc)", 0), {"missing closing quote"}},
    {"EscapeWithoutEnd", raw_safetensors(R"({"abc\)", 0), {"character after backslash"}},
    {"UnknownEscape", raw_safetensors(R"({"\x":1})", 0), {"character after backslash"}},
    {"ShortUnicodeEscape", raw_safetensors(R"({"\u12":1})", 0), {"4 hex digits"}},
    {"LoneHighSurrogate", raw_safetensors(R"({"\ud800":1})", 0), {"must be followed by U+DC00"}},
    {"HighSurrogateTwice",
     raw_safetensors(R"({"\ud800\ud800":1})", 0),
     {"must be followed by U+DC00"}},
    {"LoneLowSurrogate", raw_safetensors(R"({"\udc00":1})", 0), {"must follow U+D800"}},
    {"ControlCharacter", raw_safetensors("{\"a\nb\":1}", 0), {"control character"}},
    {"StrayUtf8Continuation", raw_safetensors("{\"\x80\":1}", 0), {"ill-formed UTF-8 byte"}},
    {"OverlongUtf8", raw_safetensors("{\"\xC0\xAF\":1}", 0), {"ill-formed UTF-8 byte"}},
    {"Utf8Surrogate", raw_safetensors("{\"\xED\xA0\x80\":1}", 0), {"ill-formed UTF-8 byte"}},
    {"Utf8BeyondUnicode",
     raw_safetensors("{\"\xF4\x90\x80\x80\":1}", 0),
     {"ill-formed UTF-8 byte"}},
    {"Utf8CutOff", raw_safetensors("{\"\xE2\x82", 0), {"ill-formed UTF-8 byte"}},
    {"HighByteOutsideAString",
     raw_safetensors("{\xFF}", 0),
     {"object key - invalid literal: path"}},
    {"MetadataThatIsNoObject", raw_safetensors(R"({"__metadata__":3})", 0), {"metadata in braces"}},
    {"MetadataOfNumbers",
     raw_safetensors(R"({"__metadata__":{"a":1}})", 0),
     {"a string as value of __metadata__"}},
    {"MetadataTwice",
     raw_safetensors(R"({"__metadata__":{},"__metadata__":{}})", 0),
     {"__metadata__ is there twice"}},
    {"MetadataKeyTwice",
     raw_safetensors(R"({"__metadata__":{"k":"1","k":"2"}})", 0),
     {"__metadata__ has the key 'k' twice"}},
};

const Lie kEntryLies[] = {
    {"EntryThatIsNoObject", one("7", 0), {"a tensor's entry in braces, found number"}},
    {"NoDtype", one(R"({"shape":[1],"data_offsets":[0,1]})", 1), {"'a'", "has no 'dtype'"}},
    {"NoShape", one(R"({"dtype":"U8","data_offsets":[0,1]})", 1), {"'a'", "has no 'shape'"}},
    {"NoOffsets", one(R"({"dtype":"U8","shape":[1]})", 1), {"'a'", "has no 'data_offsets'"}},
    {"DtypeTwice", one(R"({"dtype":"U8","dtype":"I8"})", 1), {"'a'", "the key 'dtype' twice"}},
    {"ShapeTwice", one(R"({"shape":[1],"shape":[1]})", 1), {"'a'", "the key 'shape' twice"}},
    {"OffsetsTwice",
     one(R"({"data_offsets":[0,1],"data_offsets":[0,1]})", 1),
     {"'a'", "the key 'data_offsets' twice"}},
    {"UnknownKeyWithoutValue", one(R"({"stride":})", 1), {"value - unexpected '}'"}},
    {"UnknownKeyWithNoJson", one(R"({"stride":01})", 1), {"object - unexpected number literal"}},
    {"UnknownKeyThatIsCutOff", one(R"({"stride":[{"b":nul})", 1), {"value - invalid literal"}},
    {"UnknownKeyThatNestsDeep",
     one("{\"stride\":" + std::string(1'000'000, '[') + "}", 1),
     {"a value nests deeper than 64"}},
    {"UnknownDtype", one(R"({"dtype":"F4"})", 1), {"'a'", "its dtype 'F4' is not known", "BF16"}},
    {"DtypeThatIsNoString", one(R"({"dtype":4})", 1), {"a dtype in quotes, found number"}},
    {"ShapeThatIsNoArray", one(R"({"shape":4})", 1), {"a shape in brackets"}},
    {"NegativeDimension",
     one(R"({"shape":[-1]})", 1),
     {"a dimension (an integer >= 0), found '-1'"}},
    {"FractionalDimension", one(R"({"shape":[1.5]})", 1), {"(an integer >= 0), found '1.5'"}},
    {"DimensionWithExponent", one(R"({"shape":[1e3]})", 1), {"(an integer >= 0), found '1e3'"}},
    {"DimensionWithLeadingZero",
     one(R"({"shape":[01]})", 1),
     {"array - unexpected number literal"}},
    {"DimensionBeyond63Bits",
     one(R"({"shape":[9223372036854775808]})", 1),
     {"a dimension (an integer >= 0) does not fit 63 bits"}},
    {"DimensionBeyondAllNumbers",
     one("{\"shape\":[1" + std::string(10'000, '0') + "]}", 1),
     {"number overflow parsing '1000"}},
    {"SixtyFiveDimensions",
     one("{\"shape\":[" + ones(65) + "]}", 1),
     {"'a'", "more than 64 dimensions"}},
    {"TooManyElements",
     one(R"({"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]})", 0),
     {"'a'", "more elements than 63 bits count", "[4294967296, 4294967296]"}},
    {"TooManyElementsBehindAZero",
     one(R"({"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]})", 0),
     {"'a'", "more elements than 63 bits count"}},
    {"TooManyBytes",
     one(R"({"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]})", 0),
     {"'a'", "more bytes than 63 bits count", "float64"}},
    {"OneOffset", one(R"({"data_offsets":[0]})", 1), {"'a'", "has 1 numbers, wanted two"}},
    {"ThreeOffsets", one(R"({"data_offsets":[0,1,2]})", 1), {"'a'", "more than two numbers"}},
    {"NegativeOffset", one(R"({"data_offsets":[-1,2]})", 1), {"an offset (an integer >= 0)"}},
};

const Lie kLayoutLies[] = {
    {"EndBeforeBegin", two("[4,0]", "[4,8]", 8), {"'a'", "ends before it begins: begin=4 end=0"}},
    {"EndBeyondTheFile",
     two("[0,4]", "[4,8]", 7),
     {"'b'", "beyond the file, which is truncated", "begin=4 end=8 data_bytes=7"}},
    {"EndFarBeyondTheFile",
     two("[0,4]", "[9223372036854775803,9223372036854775807]", 8),
     {"'b'", "beyond the file"}},
    {"SizeThatDoesNotFitTheShape",
     two("[0,4]", "[4,9]", 9),
     {"'b'", "its size does not fit its shape [4] of uint8: wanted=4 found=5"}},
    {"SizeOfAnotherDtype",
     one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})", 4),
     {"'a'", "its shape [2] of float32: wanted=8 found=4"}},
    {"Overlap",
     two("[0,4]", "[3,7]", 7),
     {"'b'", "overlaps that of 'a': begin=3 the other's end=4"}},
    {"TheSameBytesTwice", two("[0,4]", "[0,4]", 4), {"'b'", "overlaps that of 'a'"}},
    {"HoleAtTheStart", two("[1,5]", "[5,9]", 9), {"'a'", "a hole lies before its data: begin=1"}},
    {"HoleBetween",
     two("[0,4]", "[5,9]", 9),
     {"'b'", "a hole lies before its data: begin=5 the data before ends at 4"}},
    {"BytesAfterTheLastTensor",
     two("[0,4]", "[4,8]", 9),
     {"bytes at its end that belong to no tensor", "wanted="}},
    {"DataWithoutTensors", raw_safetensors("{}", 1), {"belong to no tensor: path="}},
    {"EmptyTensorWithinAnother",
     raw_safetensors(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                     R"("e":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}})",
                     4),
     {"'e'", "overlaps that of 'a'"}},
    {"NameTwice",
     raw_safetensors(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                     R"("\u0061":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                     2),
     {"'a'", "the header names it twice"}},
    {"NameWithControlBytesIsShownEscaped",
     raw_safetensors(R"({"x\u0000\u001b[2J":{}})", 0),
     {R"('x\x00\x1b[2J')"}},
};

INSTANTIATE_TEST_SUITE_P(Length, HostileSafetensors, ::testing::ValuesIn(kLengthLies), name_of_lie);
INSTANTIATE_TEST_SUITE_P(Json, HostileSafetensors, ::testing::ValuesIn(kJsonLies), name_of_lie);
INSTANTIATE_TEST_SUITE_P(Entry, HostileSafetensors, ::testing::ValuesIn(kEntryLies), name_of_lie);
INSTANTIATE_TEST_SUITE_P(Layout, HostileSafetensors, ::testing::ValuesIn(kLayoutLies), name_of_lie);

TEST(HostileSafetensorsMessage, CutsALongNameAtAWholeCharacter) {
  std::string name = "n";
  for (int i = 0; i < 200; ++i) name += "\xC3\xA9";
  const TemporaryFolder folder;
  const std::string path =
      folder.write("lie.safetensors", raw_safetensors("{\"" + name + "\":{}}", 0));
  EXPECT_THAT(message_of<FormatError>([&] { format::SafetensorsFile file(path); }),
              ::testing::HasSubstr("\xC3\xA9...' (401 bytes)"));
}

TEST(HostileSafetensorsMessage, AMissingFileIsAnIoError) {
  const TemporaryFolder folder;
  EXPECT_THAT(message_of<IoError>([&] { format::SafetensorsFile file(folder / "absent"); }),
              ::testing::HasSubstr("errno=2"));
}

}  // namespace
}  // namespace strata::testing

#include "strata/format/weight_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "io/temporary_folder.h"

namespace strata::testing {
namespace {

using format::CheckpointTensor;
using format::ParamRange;
using format::ParamSources;
using format::RangeCopy;
using format::SourceRange;
using format::WeightMap;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

using Shape = std::vector<std::int64_t>;

CheckpointTensor source(std::string name, Shape shape, std::size_t file, int offset,
                        DType dtype = DType::kFloat32) {
  const Numel numel = *format::checked_numel(shape);
  return {file,
          {std::move(name), dtype, std::move(shape), numel, Bytes(offset), bytes_of(numel, dtype)}};
}

SourceRange piece(std::string tensor, Shape shape, int destination = 0) {
  return {.tensor = std::move(tensor),
          .shape = std::move(shape),
          .destination = Numel(destination),
          .source_begin = {},
          .numel = {}};
}

ParamSources param(std::string name, Shape shape, std::vector<SourceRange> pieces,
                   DType dtype = DType::kFloat32) {
  return {std::move(name), std::move(shape), dtype, std::move(pieces)};
}

std::vector<RangeCopy> copies(const WeightMap& map, std::size_t index, int begin, int end) {
  const ParamRange range{index, Numel(begin), Numel(end)};
  return map.intersect(std::span(&range, 1));
}

template <typename ExpectedError>
std::string refusal(const std::vector<ParamSources>& params,
                    const std::vector<CheckpointTensor>& sources) {
  return message_of<ExpectedError>([&] { WeightMap map(params, sources, "the/folder"); });
}

TEST(WeightMap, ARankReadsOnlyItsOwnElements) {
  const std::vector<CheckpointTensor> sources{source("w", {4, 5}, 2, 1000, DType::kBFloat16)};
  const std::vector<ParamSources> params{param("w", {4, 5}, {piece("w", {4, 5})})};
  const WeightMap map(params, sources, "x");
  EXPECT_THAT(copies(map, 0, 7, 12),
              ElementsAre(RangeCopy{2, 1014_B, DType::kBFloat16, 0, Numel(7), Numel(5)}));
  EXPECT_THAT(copies(map, 0, 0, 20),
              ElementsAre(RangeCopy{2, 1000_B, DType::kBFloat16, 0, Numel(0), Numel(20)}));
  EXPECT_THAT(copies(map, 0, 7, 7), IsEmpty());
  EXPECT_THAT(map.unused(), IsEmpty());
}

TEST(WeightMap, AFusedParameterIsMadeOfItsExperts) {
  // gate and up of two experts, [3, 2] each, fused to [2, 6, 2].
  const std::vector<CheckpointTensor> sources{
      source("e0.gate", {3, 2}, 0, 100), source("e0.up", {3, 2}, 0, 200),
      source("e1.gate", {3, 2}, 1, 300), source("e1.up", {3, 2}, 0, 400)};
  const std::vector<ParamSources> params{
      param("gate_up", {2, 6, 2},
            {piece("e1.up", {3, 2}, 18), piece("e0.gate", {3, 2}, 0), piece("e0.up", {3, 2}, 6),
             piece("e1.gate", {3, 2}, 12)})};
  const WeightMap map(params, sources, "x");
  EXPECT_THAT(copies(map, 0, 4, 20),
              ElementsAre(RangeCopy{0, 116_B, DType::kFloat32, 0, Numel(4), Numel(2)},
                          RangeCopy{0, 200_B, DType::kFloat32, 0, Numel(6), Numel(6)},
                          RangeCopy{0, 400_B, DType::kFloat32, 0, Numel(18), Numel(2)},
                          RangeCopy{1, 300_B, DType::kFloat32, 0, Numel(12), Numel(6)}));
}

TEST(WeightMap, APieceMayTakeAPartOfItsTensor) {
  const std::vector<CheckpointTensor> sources{source("qkv", {6, 2}, 0, 0)};
  SourceRange q = piece("qkv", {6, 2});
  q.numel = Numel(4);
  SourceRange rest = piece("qkv", {6, 2});
  rest.source_begin = Numel(4);
  const std::vector<ParamSources> params{param("q", {2, 2}, {q}), param("kv", {4, 2}, {rest})};
  const WeightMap map(params, sources, "x");
  EXPECT_THAT(copies(map, 0, 1, 4),
              ElementsAre(RangeCopy{0, 4_B, DType::kFloat32, 0, Numel(1), Numel(3)}));
  EXPECT_THAT(copies(map, 1, 1, 8),
              ElementsAre(RangeCopy{0, 20_B, DType::kFloat32, 1, Numel(1), Numel(7)}));
}

TEST(WeightMap, TiedParametersMayReadTheSameTensor) {
  const std::vector<CheckpointTensor> sources{source("embed", {4}, 0, 8)};
  const std::vector<ParamSources> params{param("embed", {4}, {piece("embed", {4})}),
                                         param("head", {4}, {piece("embed", {4})})};
  const WeightMap map(params, sources, "x");
  EXPECT_EQ(copies(map, 0, 0, 4)[0].offset, copies(map, 1, 0, 4)[0].offset);
}

TEST(WeightMap, ReadingGoesForwardThroughEachFile) {
  const std::vector<CheckpointTensor> sources{source("a", {4}, 1, 50), source("b", {4}, 0, 90),
                                              source("c", {4}, 1, 10)};
  const std::vector<ParamSources> params{param("a", {4}, {piece("a", {4})}),
                                         param("b", {4}, {piece("b", {4})}),
                                         param("c", {4}, {piece("c", {4})})};
  const WeightMap map(params, sources, "x");
  const std::vector<ParamRange> ranges{
      {0, Numel(0), Numel(4)}, {1, Numel(0), Numel(4)}, {2, Numel(0), Numel(4)}};
  std::vector<std::size_t> order;
  for (const RangeCopy& copy : map.intersect(ranges)) order.push_back(copy.param);
  EXPECT_THAT(order, ElementsAre(1, 2, 0));
}

TEST(WeightMap, ParametersWithoutElementsNeedNoBytes) {
  const std::vector<CheckpointTensor> sources{source("e", {0, 3}, 0, 8)};
  const std::vector<ParamSources> params{param("e", {0, 3}, {piece("e", {0, 3})}),
                                         param("none", {0}, {})};
  const WeightMap map(params, sources, "x");
  EXPECT_THAT(copies(map, 0, 0, 0), IsEmpty());
  EXPECT_THAT(copies(map, 1, 0, 0), IsEmpty());
}

TEST(WeightMap, ReportsTensorsThatNobodyWants) {
  const std::vector<CheckpointTensor> sources{source("z", {1}, 0, 0), source("a", {1}, 0, 4),
                                              source("y", {1}, 0, 8)};
  const std::vector<ParamSources> params{param("a", {1}, {piece("a", {1})})};
  EXPECT_THAT(WeightMap(params, sources, "x").unused(), ElementsAre("z", "y"));
}

TEST(WeightMap, ListsMissingMisshapenAndWronglyTypedTensorsTogether) {
  const std::vector<CheckpointTensor> sources{
      source("shape", {2, 3}, 0, 0), source("rank", {6}, 0, 24),
      source("ints", {2}, 0, 48, DType::kInt32), source("fp8", {2}, 0, 56, DType::kFloat8E4M3)};
  std::vector<ParamSources> params{param("p0", {3, 2}, {piece("shape", {3, 2})}),
                                   param("p1", {2, 3}, {piece("rank", {2, 3})}),
                                   param("p2", {2}, {piece("ints", {2})}),
                                   param("p3", {2}, {piece("fp8", {2})}, DType::kBFloat16)};
  for (int i = 0; i < 12; ++i) {
    params.push_back(param("m", {1}, {piece(fmt::format("absent{}", i), {1})}));
  }
  const std::string message = refusal<FormatError>(params, sources);
  EXPECT_THAT(message, HasSubstr("path=the/folder; 12 missing: 'absent0', 'absent1'"));
  EXPECT_THAT(message, HasSubstr("'absent9' and 2 more; 2 of another shape: "));
  EXPECT_THAT(message,
              HasSubstr("'shape' wanted=[3, 2] found=[2, 3], 'rank' wanted=[2, 3] found=[6]"));
  EXPECT_THAT(message,
              HasSubstr("2 of a dtype that cannot be cast: 'ints' wanted=float32 found=int32, "
                        "'fp8' wanted=bfloat16 found=float8_e4m3fn"));
  EXPECT_THAT(message, Not(HasSubstr("absent10")));
}

TEST(WeightMap, CastsBetweenFloatingDtypesAndKeepsOthers) {
  const auto fits = [](DType from, DType to) {
    const std::vector<CheckpointTensor> sources{source("t", {2}, 0, 0, from)};
    const std::vector<ParamSources> params{param("t", {2}, {piece("t", {2})}, to)};
    return refusal<FormatError>(params, sources) == "no exception";
  };
  const auto floating = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  for (const DType from : floating) {
    for (const DType to : floating) EXPECT_TRUE(fits(from, to));
  }
  EXPECT_TRUE(fits(DType::kInt64, DType::kInt64));
  EXPECT_TRUE(fits(DType::kFloat8E4M3, DType::kFloat8E4M3));
  EXPECT_FALSE(fits(DType::kInt64, DType::kInt32));
  EXPECT_FALSE(fits(DType::kFloat32, DType::kInt32));
  EXPECT_FALSE(fits(DType::kBool, DType::kUInt8));
}

TEST(WeightMap, RefusesPiecesThatDoNotTileTheirParameter) {
  const std::vector<CheckpointTensor> sources{source("a", {4}, 0, 0), source("b", {4}, 0, 16)};
  const auto with = [&](std::vector<SourceRange> pieces) {
    return refusal<UsageError>({param("p", {2, 4}, std::move(pieces))}, sources);
  };
  EXPECT_THAT(with({piece("a", {4}, 0)}),
              HasSubstr("filled by none: parameter='p' shape=[2, 4] element=4 filled_before=4"));
  EXPECT_THAT(with({piece("b", {4}, 4)}), HasSubstr("filled by none: parameter='p'"));
  EXPECT_THAT(with({}), HasSubstr("element=0"));
  EXPECT_THAT(with({piece("a", {4}, 0), piece("b", {4}, 3)}),
              HasSubstr("filled twice: parameter='p' shape=[2, 4] element=3"));
  EXPECT_THAT(with({piece("a", {4}, 0), piece("a", {4}, 0), piece("b", {4}, 4)}),
              HasSubstr("filled twice"));
  EXPECT_THAT(with({piece("a", {4}, 0), piece("b", {4}, 5)}),
              HasSubstr("beyond the parameter: parameter='p' source='b' begin=5 numel=4 of=8"));
  EXPECT_THAT(with({piece("a", {4}, -1)}), HasSubstr("beyond the parameter"));
  SourceRange part = piece("a", {4});
  part.source_begin = Numel(2);
  part.numel = Numel(3);
  EXPECT_THAT(with({part}),
              HasSubstr("beyond its source: parameter='p' source='a' begin=2 numel=3"));
  part.source_begin = Numel(5);
  part.numel.reset();
  EXPECT_THAT(with({part}), HasSubstr("beyond its source"));
  EXPECT_THAT(refusal<UsageError>({param("p", {-1}, {})}, sources), HasSubstr("shape=[-1]"));
}

// Against a model of the answer: every element of the parameter knows its file and byte, and the
// shards of all ranks, cut anywhere, together read each element once and from the right place.
TEST(WeightMap, RandomShardsReadEveryElementOnceAndFromItsPlace) {
  std::mt19937 random(17);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 400; ++round) {
    std::vector<CheckpointTensor> sources;
    std::vector<SourceRange> pieces;
    std::vector<std::pair<std::size_t, std::int64_t>> truth;  // file and byte, by element
    int offset = 64;
    for (int i = below(6); i >= 0; --i) {
      const int numel = below(7);
      const DType dtype = below(2) == 0 ? DType::kBFloat16 : DType::kFloat32;
      const auto file = static_cast<std::size_t>(below(3));
      const std::string name = fmt::format("s{}", i);
      sources.push_back(source(name, {numel}, file, offset, dtype));
      pieces.push_back(piece(name, {numel}, static_cast<int>(truth.size())));
      for (int e = 0; e < numel; ++e) truth.emplace_back(file, offset + e * size_of(dtype).value);
      offset += 1000;
    }
    std::shuffle(pieces.begin(), pieces.end(), random);
    const int total = static_cast<int>(truth.size());
    const std::vector<ParamSources> params{param("p", {total}, pieces)};
    const WeightMap map(params, sources, "x");
    std::vector<int> seen(truth.size(), 0);
    for (int begin = 0; begin < total;) {
      const int end = begin + 1 + below(total - begin);
      for (const RangeCopy& copy : copies(map, 0, begin, end)) {
        ASSERT_GE(copy.param_begin.value, begin);
        ASSERT_LE((copy.param_begin + copy.numel).value, end);
        for (std::int64_t e = 0; e < copy.numel.value; ++e) {
          const auto element = static_cast<std::size_t>(copy.param_begin.value + e);
          const std::pair place(copy.file,
                                copy.offset.value + e * size_of(copy.source_dtype).value);
          ASSERT_EQ(place, truth[element]);
          ++seen[element];
        }
      }
      begin = end;
    }
    ASSERT_THAT(seen, ::testing::Each(1));
  }
}

}  // namespace
}  // namespace strata::testing

// Owners of Muon's matrices, and the parcels in which these travel.
#include "strata/engine/optimize/matrix_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <vector>

#include "strata/base/dtype.h"

namespace strata::engine {
namespace {

// Units of matrices s x l, one behind the other in a flat buffer.
struct Side {
  std::int64_t small;
  std::int64_t large;
  std::int64_t apart = 1;
};

std::vector<MatrixParam> params_of(const std::vector<std::vector<Side>>& units, int ranks) {
  std::vector<MatrixParam> params;
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    const std::size_t first = params.size();
    Numel offset;
    for (const Side& side : units[unit]) {
      const auto s = static_cast<double>(side.small);
      const auto l = static_cast<double>(side.large);
      const Numel numel(side.small * side.large * side.apart);
      params.push_back({static_cast<int>(unit), static_cast<int>(params.size()), offset, numel,
                        Numel(), side.apart,
                        static_cast<double>(side.apart) * s * s * (2.0 * l + s)});
      offset += align_up(numel, Numel(128));
    }
    const Numel shard = align_up(Numel((offset.value + ranks - 1) / ranks), Numel(128));
    for (std::size_t p = first; p < params.size(); ++p) params[p].shard = shard;
  }
  return params;
}

// Every element has one owner, and every piece its place in both buffers.
void expect_complete(const std::vector<MatrixParam>& params, int ranks) {
  std::vector<std::vector<int>> seen;
  for (const MatrixParam& param : params) seen.emplace_back(param.numel.size());
  const auto see = [&](const MatrixWindow& window) {
    for (const MatrixPiece& piece : window.pieces) {
      const MatrixRun& run = window.runs[piece.run];
      const MatrixParam& param = params[static_cast<std::size_t>(run.param)];
      EXPECT_EQ(param.offset + run.begin + piece.first, param.shard * piece.holder + piece.at);
      EXPECT_LE(piece.at + piece.numel, param.shard);
      for (Numel i; i < piece.numel; i += Numel(1))
        ++seen[static_cast<std::size_t>(run.param)][(run.begin + piece.first + i).size()];
    }
  };
  for (int rank = 0; rank < ranks; ++rank) {
    const MatrixPlan plan = plan_matrices(params, ranks, rank);
    for (const MatrixWindow& window : plan.in_place) {
      see(window);
      for (const MatrixPiece& piece : window.pieces) EXPECT_EQ(piece.holder, rank);
    }
    if (rank > 0) continue;
    for (const MatrixWindow& window : plan.exchanged) {
      see(window);
      std::map<std::pair<int, std::int64_t>, Bytes> taken;  // by receiver and offset
      for (const MatrixPiece& piece : window.pieces) {
        const int owner = window.runs[piece.run].owner;
        const Bytes in_parcel = piece.in_source - window.there.in_source(piece.holder, owner);
        EXPECT_EQ(piece.in_target - window.there.in_target(piece.holder, owner), in_parcel);
        EXPECT_LE(in_parcel + bytes_of(piece.numel, DType::kBFloat16),
                  window.there.at(piece.holder, owner));
        taken[{owner, piece.in_target.value}] = bytes_of(piece.numel, DType::kBFloat16);
      }
      std::pair<int, std::int64_t> before{-1, 0};
      for (const auto& [place, bytes] : taken) {
        EXPECT_TRUE(place.first != before.first || place.second >= before.second);
        before = {place.first, place.second + bytes.value};
      }
    }
  }
  for (const auto& param : seen)
    EXPECT_TRUE(std::ranges::all_of(param, [](int n) { return n == 1; }));
}

TEST(MatrixPlan, GivesEachRankOneOfAsManyUnitsAsRanks) {
  const std::vector<Side> block{{64, 64}, {32, 64}, {64, 256}, {64, 256}};
  for (const int ranks : {2, 4}) {
    const std::vector<MatrixParam> params = params_of({8, block}, ranks);
    expect_complete(params, ranks);
    const MatrixPlan plan = plan_matrices(params, ranks, 1);
    EXPECT_TRUE(plan.in_place.empty());
    std::map<int, int> owners;  // by unit
    Bytes sent;
    for (const MatrixWindow& window : plan.exchanged) {
      for (const MatrixRun& run : window.runs)
        EXPECT_EQ(owners.try_emplace(run.unit, run.owner).first->second, run.owner);
      for (int to = 0; to < ranks; ++to) sent += to == 1 ? Bytes() : window.there.at(1, to);
    }
    for (const auto& [unit, owner] : owners) EXPECT_EQ(owner, unit % ranks);
    Numel all;
    for (const MatrixParam& param : params) all += param.numel;
    EXPECT_EQ(sent.value, 2 * all.value * (ranks - 1) / (ranks * ranks));
  }
}

TEST(MatrixPlan, DealsTheRestByCost) {
  // Three blocks and one that is unlike: for four ranks there are no turns.
  const std::vector<Side> block{{64, 64}, {64, 256}};
  const std::vector<MatrixParam> params = params_of({block, block, {{128, 512}}, block}, 4);
  expect_complete(params, 4);
  const MatrixPlan plan = plan_matrices(params, 4, 0);
  std::vector<double> loads(4);
  for (const MatrixWindow& window : plan.exchanged) {
    for (const MatrixRun& run : window.runs)
      loads[static_cast<std::size_t>(run.owner)] +=
          params[static_cast<std::size_t>(run.param)].cost;
  }
  // The dearest is alone; the others share what is left as well as whole matrices can be shared.
  EXPECT_EQ(*std::ranges::max_element(loads), params[4].cost);
  EXPECT_LE(std::accumulate(loads.begin(), loads.end(), 0.0) - params[4].cost,
            3.0 * (params[1].cost + params[0].cost));
}

TEST(MatrixPlan, LeavesMatricesInPlaceThatLieWithOneRank) {
  const std::vector<Side> block{{64, 64}, {32, 64, 15}, {32, 32, 15}};
  for (const int ranks : {1, 2, 3}) {
    const std::vector<MatrixParam> params = params_of({3, block}, ranks);
    expect_complete(params, ranks);
    std::int64_t in_place = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      for (const MatrixWindow& window : plan_matrices(params, ranks, rank).in_place) {
        for (const MatrixRun& run : window.runs) in_place += run.numel.value;
      }
    }
    std::int64_t exchanged = 0;
    for (const MatrixWindow& window : plan_matrices(params, ranks, 0).exchanged) {
      for (const MatrixRun& run : window.runs) exchanged += run.numel.value;
    }
    if (ranks == 1) {
      EXPECT_EQ(exchanged, 0);
    } else {  // dense ones, and those at a cut
      EXPECT_GE(exchanged, 3 * 64 * 64);
      EXPECT_LE(exchanged, 3 * (64 * 64 + (ranks - 1) * 32 * 64));
    }
    EXPECT_EQ(in_place + exchanged, 3 * (64 * 64 + 15 * 32 * 64 + 15 * 32 * 32));
  }
}

TEST(MatrixPlan, GivesDenseMatricesToTheRankWithFewerInPlace) {
  // The dense one fills half of the first rank's slices.
  const std::vector<Side> block{{64, 128}, {32, 64, 12}};
  const std::vector<MatrixParam> params = params_of({6, block}, 2);
  expect_complete(params, 2);
  std::vector<double> loads(2);
  const auto add = [&](const MatrixWindow& window) {
    for (const MatrixRun& run : window.runs) {
      const MatrixParam& param = params[static_cast<std::size_t>(run.param)];
      const double part =
          static_cast<double>(run.numel.value) / static_cast<double>(param.numel.value);
      loads[static_cast<std::size_t>(run.owner)] += part * param.cost;
    }
  };
  for (int rank = 0; rank < 2; ++rank)
    std::ranges::for_each(plan_matrices(params, 2, rank).in_place, add);
  std::ranges::for_each(plan_matrices(params, 2, 0).exchanged, add);
  EXPECT_LE(std::abs(loads[0] - loads[1]), params[0].cost);
}

TEST(MatrixPlan, WindowsHaveABound) {
  const std::vector<Side> block{{4096, 4096}, {1024, 4096}, {4096, 12288}, {4096, 12288}};
  const std::vector<MatrixParam> params = params_of({5, block}, 2);
  const MatrixPlan plan = plan_matrices(params, 2, 0);
  EXPECT_EQ(plan.workspace, bytes_of(Numel(4096 * 12288), DType::kBFloat16));
  EXPECT_LE(plan.given, plan.workspace + plan.workspace);
  EXPECT_GE(plan.exchanged.size(), 8U);
}

}  // namespace
}  // namespace strata::engine

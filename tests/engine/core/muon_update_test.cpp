// Muon's step over every kind of collectives: the same bits, one owner for each matrix, and no more
// bytes than the owners need.
#include "strata/engine/optimize/muon_update.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "engine/core/external_cases.h"
#include "strata/engine/optimize/native_optimizer.h"

namespace strata::engine::fake {
namespace {

// Some parameters are matrices to Muon, whose products reverse the order of their elements here.
FakeModel model_of_muon(DType dtype) {
  plan::ModelBuilder builder = uneven_builder(dtype);
  for (plan::ParamSpec& param : builder.params) {
    if (param.numel() > Numel(100)) param.rule = UpdateRule::kMuon;
  }
  return FakeModel(builder);
}

using Weights = std::vector<std::vector<std::byte>>;

Weights trained_by_muon(DType dtype, int world, int stage, Over over, memory::Tier tier) {
  const FakeModel model = model_of_muon(dtype);
  const testing::TemporaryFolder folder;
  Weights weights(static_cast<std::size_t>(model.count()));
  expect_no_errors(run_ranks(world, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    RankOptions options;
    options.rule = UpdateRule::kAdamW;
    options.engine.stage = stage;
    options.engine.gradient_clipping = 0.25;
    if (tier != memory::Tier::kDevice) place_states(options.engine, tier, folder.path());
    if (over == Over::kLatePeers) options.device = comm::conformance::late_device(r);
    FakeRank rank(model, options, joined(std::move(collectives), over, options.device));
    auto& optimizer = dynamic_cast<NativeOptimizer&>(*rank.engine().optimizer());
    ASSERT_NE(optimizer.muon(), nullptr);
    std::vector<MuonParam> params(static_cast<std::size_t>(model.count()), {0.5, r >= 0});
    optimizer.muon()->set(params, [&](std::span<const OwnedMatrices> owned) {
      rank.engine().device().compute_stream().synchronize();
      for (const OwnedMatrices& matrix : owned) {
        auto* const all = reinterpret_cast<std::uint16_t*>(matrix.values.data());
        std::reverse(all, all + matrix.values.size() / 2);
      }
    });
    for (int step = 0; step < kSteps; ++step) {
      rank.groups = groups_of(step);
      for (int micro = 0; micro < 2; ++micro) {
        rank.forward();
        add_all(rank, all_gradients(model, step, micro, r), {}, micro == 1);
      }
      ASSERT_TRUE(rank.engine().step(rank.groups, 1.0, false).applied);
    }
    for (int p = 0; p < model.count(); ++p) {
      const std::vector<std::byte> found = rank.weight(p);
      if (r == 0) weights[static_cast<std::size_t>(p)] = found;
    }
  }));
  return weights;
}

class MuonUpdateTest : public ::testing::TestWithParam<Over> {};

TEST_P(MuonUpdateTest, HasTheSameBitsOverEveryKindOfCollectives) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (GetParam() != Over::kThreads && dtype != DType::kBFloat16) continue;
    const int world = dtype == DType::kBFloat16 ? 3 : 2;
    const Weights wanted = trained_by_muon(dtype, world, 0, Over::kThreads, memory::Tier::kDevice);
    for (const int stage : {1, 3})
      EXPECT_EQ(trained_by_muon(dtype, world, stage, GetParam(), memory::Tier::kDevice), wanted);
    EXPECT_EQ(trained_by_muon(dtype, world, 3, GetParam(), memory::Tier::kHost), wanted);
    EXPECT_NE(wanted.front(), std::vector<std::byte>());
  }
}

INSTANTIATE_TEST_SUITE_P(Collectives, MuonUpdateTest,
                         ::testing::Values(Over::kThreads, Over::kPeers, Over::kPeersGather,
                                           Over::kPeersReduce, Over::kLatePeers, Over::kJoint));

// Tells of exchanges as they start: the tag, and the bytes that go from this rank to others.
class WatchedExchanges final : public comm::Collectives {
 public:
  using Started = std::function<void(std::string_view tag, Bytes sent)>;
  WatchedExchanges(std::shared_ptr<comm::Collectives> ranks, Started started)
      : Collectives(ranks->rank(), ranks->traits()),
        ranks_(std::move(ranks)),
        started_(std::move(started)) {}

  std::string_view name() const override { return ranks_->name(); }
  std::unique_ptr<comm::SharedBuffer> allocate(std::string name, Bytes bytes) override {
    return ranks_->allocate(std::move(name), bytes);
  }
  std::unique_ptr<comm::Work> all_gather(const comm::SliceMap& slices, std::span<std::byte> flat,
                                         std::string_view tag) override {
    return ranks_->all_gather(slices, flat, tag);
  }
  std::unique_ptr<comm::Work> finish_gathers() override { return ranks_->finish_gathers(); }
  std::unique_ptr<comm::Work> reduce_scatter(const comm::Reduction& reduction,
                                             std::string_view tag) override {
    return ranks_->reduce_scatter(reduction, tag);
  }
  std::unique_ptr<comm::Work> exchange(const comm::Exchange& exchange,
                                       std::string_view tag) override {
    started_(tag, exchange.parcels->sent(rank()) - exchange.parcels->at(rank(), rank()));
    return ranks_->exchange(exchange, tag);
  }
  void all_reduce(std::span<double> values, comm::ReduceOp op) override {
    ranks_->all_reduce(values, op);
  }
  void broadcast(std::span<std::byte> bytes, int root) override { ranks_->broadcast(bytes, root); }
  std::vector<std::string> all_gather_text(const std::string& text) override {
    return ranks_->all_gather_text(text);
  }
  void barrier() override { ranks_->barrier(); }
  void require_usable() override { ranks_->require_usable(); }
  void end(comm::Ending ending, std::string_view reason) noexcept override {
    ranks_->end(ending, reason);
  }

 private:
  std::shared_ptr<comm::Collectives> ranks_;
  Started started_;
};

// A rank's part in two steps of a model: bytes that it has sent to others, and the matrices and
// elements that it has orthogonalized.
struct Share {
  std::int64_t sent = 0;
  std::int64_t matrices = 0;
  std::int64_t elements = 0;
};

std::vector<Share> shares_of(const FakeModel& model, int world, int failing = -1) {
  std::vector<Share> shares(static_cast<std::size_t>(world));
  const auto errors = run_ranks(world, [&](int r, std::shared_ptr<comm::Collectives> collectives) {
    Share& share = shares[static_cast<std::size_t>(r)];
    RankOptions options;
    options.rule = UpdateRule::kAdamW;
    options.engine.stage = 3;
    const auto count = [&](std::string_view, Bytes sent) { share.sent += sent.value; };
    FakeRank rank(model, options,
                  std::make_shared<WatchedExchanges>(std::move(collectives), count));
    auto& optimizer = dynamic_cast<NativeOptimizer&>(*rank.engine().optimizer());
    optimizer.muon()->set({}, [&](std::span<const OwnedMatrices> owned) {
      if (r == failing) throw UsageError("the products of rank {} fail", r);
      share.matrices += std::ssize(owned);
      for (const OwnedMatrices& matrix : owned)
        share.elements += static_cast<std::int64_t>(matrix.values.size() / 2);
    });
    rank.groups = groups_of(0);
    for (int step = 0; step < 2; ++step) {
      rank.forward();
      add_all(rank, all_gradients(model, step, 0, r), {}, true);
      rank.engine().step(rank.groups, 1.0, false);
    }
  });
  if (failing < 0) expect_no_errors(errors);
  for (const std::string& error : errors)
    EXPECT_TRUE(failing < 0 || error.find("products of rank") != std::string::npos) << error;
  return shares;
}

FakeModel equal_blocks(int blocks, DType dtype) {
  plan::ModelBuilder builder;
  const int layers = builder.list(0, "layers");
  for (int b = 0; b < blocks; ++b) {
    const int layer = builder.module(layers, std::to_string(b), "Layer");
    for (const std::int64_t numel : {768, 1536, 768}) {
      const int p = builder.param(layer, "w" + std::to_string(builder.params.size()), numel, dtype);
      builder.params[static_cast<std::size_t>(p)].rule = UpdateRule::kMuon;
    }
  }
  plan::PlanOptions options;
  options.wrap = {"Layer"};
  return {builder, options};
}

TEST(MuonUpdate, SendsEachSliceToItsOwnerAndBack) {
  for (const int world : {1, 2, 3}) {
    const FakeModel model = equal_blocks(6, DType::kBFloat16);
    const std::int64_t all = std::accumulate(
        model.params.begin(), model.params.end(), std::int64_t{0},
        [](std::int64_t sum, const plan::ParamSpec& param) { return sum + param.numel().value; });
    std::int64_t matrices = 0;
    for (const Share& share : shares_of(model, world)) {
      const std::int64_t steps = 2;
      EXPECT_EQ(share.sent, steps * 2 * 2 * all * (world - 1) / (world * world)) << world;
      EXPECT_EQ(share.elements, steps * all / world) << world;
      matrices += share.matrices;
    }
    EXPECT_EQ(matrices, 2 * model.count());
  }
}

TEST(MuonUpdate, AnErrorOfOneRankIsThatOfAll) {
  shares_of(equal_blocks(5, DType::kFloat32), 3, 1);
}

// Blocks of matrices of which each is a window of an exchange; `experts` of two blocks are apart.
std::vector<MatrixParam> many_matrices(int ranks, std::int64_t experts) {
  std::vector<MatrixParam> params;
  for (int unit = 0; unit < 7; ++unit) {
    const std::int64_t apart = unit < 2 ? experts : 1;
    const Numel all(768 + 1536 + 768 * apart);
    const Numel shard = align_up(Numel((all.value + ranks - 1) / ranks), Numel(128));
    Numel offset;
    for (const std::int64_t numel : {std::int64_t{768}, std::int64_t{1536}, 768 * apart}) {
      const bool is_apart = numel == 768 * apart && apart > 1;
      params.push_back({unit, static_cast<int>(params.size()), offset, Numel(numel), shard,
                        is_apart ? apart : 1, static_cast<double>(numel)});
      offset += Numel(numel);
    }
  }
  return params;
}

std::uint16_t value_of(int param, std::int64_t element, int step) {
  return static_cast<std::uint16_t>(step == 0 ? param * 4099 + element * 7
                                              : value_of(param, element, step - 1) * 3 + element);
}

// One rank's slices of all units, on a device that may run late.
class Slices {
 public:
  Slices(const std::vector<MatrixParam>& params, int rank, device::CpuDevice& device)
      : params_(params), rank_(rank), device_(device) {
    for (const MatrixParam& param : params) {
      auto& slice = slices_[param.unit];
      slice.resize(param.shard.size());
      for_each(param, [&](std::int64_t element, std::size_t at) {
        slice[at] = value_of(param.param, element, 0);
      });
    }
  }
  std::span<std::byte> part(const MatrixRun& run, const MatrixPiece& piece) {
    return std::as_writable_bytes(std::span(slices_.at(run.unit)))
        .subspan(bytes_of(piece.at, DType::kBFloat16).size(),
                 bytes_of(piece.numel, DType::kBFloat16).size());
  }
  void expect_step(int step) {
    device_.compute_stream().synchronize();
    for (const MatrixParam& param : params_) {
      int wrong = 0;
      for_each(param, [&](std::int64_t element, std::size_t at) {
        wrong += slices_.at(param.unit)[at] == value_of(param.param, element, step) ? 0 : 1;
      });
      EXPECT_EQ(wrong, 0) << "parameter " << param.param << ", step " << step;
    }
  }

 private:
  template <typename Work>
  void for_each(const MatrixParam& param, const Work& work) const {
    const Numel begin = param.shard * rank_;
    for (std::int64_t e = 0; e < param.numel.value; ++e) {
      const Numel at = param.offset + Numel(e);
      if (at >= begin && at < begin + param.shard) work(e, (at - begin).size());
    }
  }

  const std::vector<MatrixParam>& params_;
  int rank_;
  device::CpuDevice& device_;
  std::map<int, std::vector<std::uint16_t>> slices_;  // by unit
};

// The exchanges and products in the order in which a rank has started them.
std::vector<std::string> events_of(Over over, std::int64_t experts) {
  constexpr int kRanks = 3;
  std::vector<std::string> of_first;
  expect_no_errors(run_ranks(kRanks, [&](int r, std::shared_ptr<comm::Collectives> threads) {
    const auto late = over == Over::kLatePeers ? comm::conformance::late_device(r) : nullptr;
    const std::shared_ptr<device::CpuDevice> device =
        late != nullptr ? late : std::make_shared<device::CpuDevice>();
    std::vector<std::string> events;
    WatchedExchanges collectives(joined(std::move(threads), over, device),
                                 [&](std::string_view tag, Bytes) { events.emplace_back(tag); });
    const std::vector<MatrixParam> params = many_matrices(kRanks, experts);
    Slices slices(params, r, *device);
    MatrixExchange exchange(collectives, *device, "test");
    exchange.set(plan_matrices(params, kRanks, r, {Numel(1000), Numel(2000)}));
    MatrixExchange::Steps steps;
    steps.counts = [](const MatrixRun&) { return true; };
    steps.make = [&](const MatrixRun& run, const MatrixPiece& piece, std::span<std::byte> values) {
      device->copy(values, slices.part(run, piece), device->compute_stream());
    };
    steps.apply = [&](const MatrixRun& run, const MatrixPiece& piece,
                      std::span<const std::byte> values) {
      device->copy(slices.part(run, piece), values, device->compute_stream());
    };
    steps.orthogonalize = [&](std::span<const OwnedMatrices> owned) {
      events.emplace_back("products");
      for (const OwnedMatrices& matrix : owned) {
        const auto compute = [matrix] {
          auto* const all = reinterpret_cast<std::uint16_t*>(matrix.values.data());
          for (std::size_t i = 0; i < matrix.values.size() / 2; ++i)
            all[i] = static_cast<std::uint16_t>(all[i] * 3 + matrix.begin.value +
                                                static_cast<std::int64_t>(i));
        };
        if (late != nullptr)
          late->enqueue(late->compute_stream(), compute);
        else
          compute();
      }
    };
    for (int step = 1; step <= 3; ++step) {
      events.clear();
      exchange.run(steps);
      slices.expect_step(step);
    }
    collectives.barrier();
    if (r == 0) of_first = events;
  }));
  return of_first;
}

TEST(MatrixExchange, TheNextMatricesTravelWhileOwnersCompute) {
  std::vector<std::string> wanted{"matrices"};
  constexpr int kWindows = 7;  // two turns of three kinds, and the block that is left over
  for (int window = 0; window < kWindows; ++window) {
    if (window + 1 < kWindows) wanted.emplace_back("matrices");
    wanted.emplace_back("products");
    wanted.emplace_back("results");
  }
  for (const Over over : {Over::kThreads, Over::kPeers, Over::kLatePeers})
    EXPECT_EQ(events_of(over, 1), wanted);
}

TEST(MatrixExchange, MatricesInPlaceAreComputedBetweenWindows) {
  for (const Over over : {Over::kThreads, Over::kLatePeers}) {
    const std::vector<std::string> events = events_of(over, 12);
    EXPECT_EQ(events[0], "matrices");
    EXPECT_GT(std::ranges::count(events, "products"), std::ranges::count(events, "results"));
  }
}

}  // namespace
}  // namespace strata::engine::fake

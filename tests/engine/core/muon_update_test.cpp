// Muon's step over every kind of collectives: the same bits, one owner for each matrix, and no more
// bytes than the owners need.
#include "strata/engine/optimize/muon_update.h"

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

// Counts the bytes that exchanges bring from this rank to others.
class CountsExchanges final : public comm::Collectives {
 public:
  CountsExchanges(std::shared_ptr<comm::Collectives> ranks, std::int64_t& sent)
      : Collectives(ranks->rank(), ranks->traits()), ranks_(std::move(ranks)), sent_(sent) {}

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
    sent_ += (exchange.parcels->sent(rank()) - exchange.parcels->at(rank(), rank())).value;
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
  std::int64_t& sent_;
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
    FakeRank rank(model, options,
                  std::make_shared<CountsExchanges>(std::move(collectives), share.sent));
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

}  // namespace
}  // namespace strata::engine::fake

// The ways in which values get into the engine, apart from those that a model on the CPU takes by
// default; the choice among them; and the state that a failed start leaves. Ranks are threads of
// this process.
#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>
#include <gmock/gmock.h>
#include <sys/mman.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/grouped_ranks.h"
#include "device/limited_device.h"
#include "strata/base/error.h"
#include "strata/device/cpu_device.h"
#include "strata/offload/make_store.h"
#include "strata/torch/start/adoption.h"
#include "strata/torch/start/host_transfer.h"
#include "strata/torch/start/lending.h"
#include "strata/torch/start/model_start.h"
#include "torch/live_engines.h"

namespace strata::torch {
namespace {

using ::testing::AllOf;
using testing::bring_in;
using testing::config_of;
using ::testing::Each;
using testing::gathered_at_the_end;
using testing::Given;
using ::testing::HasSubstr;
using testing::kHere;
using testing::make_net;
using testing::make_nets;
using testing::Net;
using testing::on_live_engines;
using testing::rounded;
using testing::run_ranks;
using testing::values_in;
using testing::values_of;

class HostIntakeAtStage : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, HostIntakeAtStage, ::testing::Values(1, 3));

TEST_P(HostIntakeAtStage, EveryRankBringsItsPartAndAllLearnWhatDiffers) {
  on_live_engines(3, GetParam(), [&](ShardedModel& model, const auto& parameters) {
    comm::Collectives& collectives = model.engine().collectives();
    const int rank = collectives.rank();
    std::vector<at::Tensor> expected;
    for (const ModelParameter& parameter : parameters) expected.push_back(rounded(parameter));
    // Rank 1 alone has another number at the place that it owns of this parameter, if of any.
    constexpr int kParam = 6;
    const auto [begin, end] = model.engine().weights().owned_range(kParam);
    double where[] = {rank == 1 && begin < end ? static_cast<double>(begin.value) : -1.0};
    collectives.all_reduce(where, comm::ReduceOp::kMax);
    ASSERT_GE(where[0], 0.0);
    const auto place = static_cast<std::int64_t>(where[0]);
    if (rank == 1) parameters[kParam].variable.detach().view({-1})[place] = 77.0;
    expected[kParam].view({-1})[place] = 77.0;

    const Given given = bring_in(model, parameters);
    EXPECT_TRUE(given.differs);
    EXPECT_EQ(given.complete, GetParam() == 3);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::equal(given.values[i], expected[i])) << "parameter " << i;
      for (const Comparison::Run& run : given.runs[i]) {
        const bool holds =
            i == kParam && run.begin == static_cast<std::size_t>(4 * place) / kBlock.size();
        EXPECT_EQ(run.differs, holds) << "parameter " << i << ", block " << run.begin;
      }
    }
  });
}

TEST_P(HostIntakeAtStage, WhatIsStoredIsGatheredWhileTheRestIsLookedAt) {
  on_live_engines(3, GetParam(), [&](ShardedModel& model, const auto& parameters) {
    const Given given = bring_in(model, parameters);
    EXPECT_FALSE(given.differs);
    for (std::size_t i = 0; i < parameters.size(); ++i)
      EXPECT_TRUE(at::equal(given.values[i], rounded(parameters[i]))) << "parameter " << i;
    EXPECT_EQ(gathered_at_the_end(model.engine().init_report()), Bytes());
  });
}

// Rank 2 holds the same slices as rank 0, which then does not keep any of its blocks alone.
TEST_P(HostIntakeAtStage, AReplicaOfTheFirstRanksSliceIsComparedWithIt) {
  constexpr int kWorld = 4;
  constexpr int kParam = 6;
  const std::vector<Net> nets = make_nets(kWorld, 4, 1200);
  comm::conformance::GroupedRanks groups(kWorld, 2);
  run_ranks(groups, kWorld, [&](const std::shared_ptr<comm::Collectives>& collectives) {
    const auto rank = static_cast<std::size_t>(collectives->rank());
    const ModuleDescription description = describe_module(*nets[rank]);
    ShardedModel model(description.input, config_of(GetParam(), kWorld), engine::UpdateRule::kNone,
                       make_runtime(kHere, 2, collectives), "engine");
    const std::vector<ModelParameter>& parameters = description.input.parameters;
    const auto [begin, end] = model.engine().weights().owned_range(kParam);
    ASSERT_EQ(rank % 2 == 0, begin == Numel() && Numel(kBlock.value / 4) <= end);
    std::vector<ModelParameter> changed = parameters;
    for (ModelParameter& parameter : changed)
      parameter.variable = at::ones(parameter.shape, at::TensorOptions().dtype(at::kFloat));
    if (rank == 2) changed[kParam].variable.view({-1})[0] = 77.0;
    const Given given = bring_in(model, changed);
    for (std::size_t i = 0; i < changed.size(); ++i) {
      for (const Comparison::Run& run : given.runs[i])
        EXPECT_EQ(run.differs, i == kParam && run.begin == 0) << i << ", block " << run.begin;
    }
    model.destroy(false);
  });
}

TEST(HostExport, CopiesWhatTheRingHoldsManyTimesOver) {
  const Net net = make_net(1, 5);
  const ModuleDescription description = describe_module(*net);
  ShardedModel model(description.input, config_of(0, 1), engine::UpdateRule::kNone,
                     make_runtime(kHere, 1, comm::LocalGroup(1).rank(0)), "engine");
  ThreadPool threads(3);
  engine::InitReport::Phase phase(model.engine().init_report(), "move out", Bytes());
  HostExport way(model.engine(), threads, phase);
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> targets;
  for (const std::int64_t numel : {1, 25'000'003, 0, 63, 5'000'000, 1'000'001}) {
    sources.push_back(at::randint(0, 256, {numel}, at::TensorOptions().dtype(at::kByte)));
    targets.push_back(empty_on_host(sources.back()));
    const auto bytes = static_cast<std::size_t>(numel);
    way.add({static_cast<std::byte*>(targets.back().mutable_data_ptr()), bytes},
            {static_cast<const std::byte*>(sources.back().const_data_ptr()), bytes});
  }
  way.flush();
  for (std::size_t i = 0; i < sources.size(); ++i) EXPECT_TRUE(at::equal(sources[i], targets[i]));
}

// Refuses to hold more than `most` blocks.
class SmallStore final : public offload::StateStore {
 public:
  SmallStore(std::shared_ptr<offload::StateStore> store, int most)
      : store_(std::move(store)), most_(most) {}
  memory::Tier tier() const override { return store_->tier(); }
  std::vector<offload::BlockId> add_all(std::vector<offload::BlockSpec> blocks) override {
    most_ -= static_cast<int>(blocks.size());
    if (most_ < 0) throw OutOfMemoryError("the store is full");
    return store_->add_all(std::move(blocks));
  }
  void take_back(std::span<const offload::BlockId> added) noexcept override {
    store_->take_back(added);
  }
  Bytes size_of(offload::BlockId block) const override { return store_->size_of(block); }
  std::vector<std::unique_ptr<offload::Lease>> fetch_all(std::span<const offload::Part> parts,
                                                         offload::Access access) override {
    return store_->fetch_all(parts, access);
  }

 private:
  std::shared_ptr<offload::StateStore> store_;
  int most_;
};

// The message of initialize when memory has room for `blocks` blocks of state; the model has 4
// units, whose masters are two blocks each.
std::string start_with_room_for(int blocks, const std::string& tier, const Net& net) {
  ModelRuntime runtime = make_runtime(kHere, 1, comm::LocalGroup(1).rank(0));
  runtime.states = std::make_shared<SmallStore>(
      std::shared_ptr(offload::make_memory_store(memory::Tier::kDevice, *runtime.device)), blocks);
  const ModuleDescription description = describe_module(*net);
  try {
    const ShardedModel model(description.input, config_of(3, 1, tier), engine::UpdateRule::kAdamW,
                             runtime, "engine");
    return "no error";
  } catch (const OutOfMemoryError& error) {
    return error.what();
  }
}

TEST(FailedStart, LeavesTheModelAsItWas) {
  for (const std::string tier : {"device_copy", "host"}) {
    for (const int blocks : {0, 4, 10}) {  // before, amid and after the values
      const Net net = make_net(4, 30);
      const std::vector<at::Tensor> before = values_of(net);
      EXPECT_EQ(start_with_room_for(blocks, tier, net), "the store is full");
      const std::vector<at::Tensor> after = values_of(net);
      for (std::size_t i = 0; i < before.size(); ++i)
        EXPECT_TRUE(at::equal(before[i], after[i])) << tier << ", parameter " << i;
      for (const at::Tensor& p : net->parameters()) EXPECT_TRUE(p.requires_grad());
    }
  }
}

TEST(FailedStart, SaysSoWhereTheModelsMemoryHadBeenGivenUp) {
  const Net net = make_net(4, 30);
  EXPECT_THAT(start_with_room_for(4, "device_grow", net),
              ::testing::AllOf(HasSubstr("the store is full. The memory of 4 of 8 parameters"),
                               HasSubstr("build the model again")));
  int empty = 0;
  for (const at::Tensor& p : net->parameters()) empty += p.numel() == 0 ? 1 : 0;
  EXPECT_EQ(empty, 4);
}

TEST(FailedStart, CanBeTriedAgain) {
  const Net net = make_net(4, 30);
  const std::vector<at::Tensor> before = values_of(net);
  EXPECT_EQ(start_with_room_for(4, "device_copy", net), "the store is full");
  ModelRuntime runtime = make_runtime(kHere, 1, comm::LocalGroup(1).rank(0));
  ShardedModel model(describe_module(*net).input, config_of(3, 1), engine::UpdateRule::kAdamW,
                     runtime, "engine");
  model.destroy(true);
  const std::vector<at::Tensor> after = values_of(net);
  for (std::size_t i = 0; i < before.size(); ++i)
    EXPECT_TRUE(at::equal(before[i].to(at::kBFloat16), after[i])) << "parameter " << i;
}

// Values that ranks read where rank 0 has them. Ranks are threads of this process.

bool take(ShardedModel& model, const std::vector<ModelParameter>& parameters,
          const std::vector<int>& on_host, Bytes copied_most = 4_MiB) {
  const OriginalValues originals(parameters, model.specs());
  const bool taken = take_from_rank_0(model.engine(), originals, on_host, 3, copied_most);
  if (taken) model.engine().weights_changed();
  return taken;
}

// The parameters in the order of units, in which an engine's memory grows.
std::vector<int> params_by_unit(ShardedModel& model) {
  std::vector<int> params;
  for (const engine::Unit& unit : model.engine().weights().units())
    params.insert(params.begin(), unit.spec.params.begin(), unit.spec.params.end());
  return params;
}

class FromRank0AtStage : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Stages, FromRank0AtStage, ::testing::Values(1, 3));

TEST_P(FromRank0AtStage, EveryRankTakesItsPartOfRank0sValuesWhateverItHasItself) {
  on_live_engines(3, GetParam(), [&](ShardedModel& model, const auto& parameters) {
    std::vector<at::Tensor> expected;
    for (const ModelParameter& parameter : parameters) expected.push_back(rounded(parameter));
    model.engine().collectives().barrier();
    if (model.engine().collectives().rank() > 0) {
      for (const ModelParameter& parameter : parameters) parameter.variable.detach().add_(1.0);
    }
    EXPECT_TRUE(take(model, parameters, params_by_unit(model)));
    const std::vector<at::Tensor> values = values_in(model);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(at::equal(values[i], expected[i])) << "parameter " << i;
    Bytes whole;
    for (const engine::Unit& unit : model.engine().weights().units())
      whole += Bytes(unit.resident.size());
    EXPECT_EQ(whole > Bytes(), GetParam() == 1);
    EXPECT_LE(gathered_at_the_end(model.engine().init_report()), whole / 4);
  });
}

// The same values, columns first.
at::Tensor turned(const at::Tensor& values) {
  return values.detach().t().contiguous().t();
}

TEST_P(FromRank0AtStage, OfRank0sValuesThatAreNotContiguousCopiesAreTaken) {
  on_live_engines(3, GetParam(), [&](ShardedModel& model, const auto& given) {
    std::vector<ModelParameter> parameters = given;
    at::Tensor& matrix = parameters[2].variable;
    if (model.engine().collectives().rank() == 0) matrix = turned(matrix.detach().add(1.0));
    ASSERT_EQ(matrix.is_contiguous(), model.engine().collectives().rank() > 0);
    ASSERT_TRUE(take(model, parameters, params_by_unit(model)));
    const std::vector<at::Tensor> values = values_in(model);
    for (std::size_t i = 0; i < given.size(); ++i) {
      ModelParameter expected = given[i];
      if (i == 2) expected.variable = given[i].variable.detach().add(1.0);
      EXPECT_TRUE(at::equal(values[i], rounded(expected))) << "parameter " << i;
    }
  });
}

using Change = std::function<void(int rank, std::vector<ModelParameter>&, std::vector<int>&)>;

// `reason`: of the ranks that have all values on the host.
void expect_nothing_is_taken(const std::string& reason, const Change& change) {
  on_live_engines(3, 1, [&](ShardedModel& model, const auto& given) {
    std::vector<ModelParameter> parameters = given;
    std::vector<int> on_host = params_by_unit(model);
    change(model.engine().collectives().rank(), parameters, on_host);
    const std::vector<at::Tensor> before = values_in(model);
    EXPECT_FALSE(take(model, parameters, on_host, Bytes()));
    const std::vector<at::Tensor> after = values_in(model);
    for (std::size_t i = 0; i < before.size(); ++i)
      EXPECT_TRUE(at::equal(after[i], before[i])) << "parameter " << i;
    if (on_host.size() == given.size()) {
      EXPECT_THAT(model.engine().init_report().reason, ::testing::HasSubstr(reason));
    }
  });
}

TEST(FromRank0, NothingIsTakenWhereARankHasOtherPlaces) {
  expect_nothing_is_taken("(rank 2: not all values are on the host)",
                          [](int rank, auto& /*parameters*/, std::vector<int>& on_host) {
                            if (rank == 2) on_host.pop_back();
                          });
}

TEST(FromRank0, NothingIsTakenWhereTooMuchOfRank0sMemoryHasAnotherOrder) {
  expect_nothing_is_taken("(rank 0: more than 0 B of values are not contiguous)",
                          [](int rank, std::vector<ModelParameter>& parameters, auto& /*on_host*/) {
                            if (rank == 0) parameters[2].variable = turned(parameters[2].variable);
                          });
}

// Memory that the system lets no process read.
class Forbidden {
 public:
  explicit Forbidden(std::size_t bytes)
      : bytes_(bytes),
        memory_(::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~Forbidden() { ::munmap(memory_, bytes_); }
  Forbidden(const Forbidden&) = delete;
  Forbidden& operator=(const Forbidden&) = delete;
  void* data() const { return memory_; }

 private:
  std::size_t bytes_;
  void* memory_;
};

TEST_P(FromRank0AtStage, WhatCannotBeReadAfterAllIsLeftToTheComparison) {
  on_live_engines(3, GetParam(), [&](ShardedModel& model, const auto& parameters) {
    std::vector<ModelParameter> unreadable = parameters;
    at::Tensor& last = unreadable.front().variable;  // in the order of params_by_unit()
    const Forbidden memory(last.nbytes());
    if (model.engine().collectives().rank() == 0)
      last = at::from_blob(memory.data(), last.sizes(), last.options().requires_grad(false));
    EXPECT_FALSE(take(model, unreadable, params_by_unit(model)));
    EXPECT_THAT(
        model.engine().init_report().reason,
        ::testing::AllOf(::testing::HasSubstr("reading the weights failed on rank"),
                         ::testing::HasSubstr("/mem"), ::testing::HasSubstr("Bad address")));
    const Given given = bring_in(model, parameters);
    for (std::size_t i = 0; i < parameters.size(); ++i)
      EXPECT_TRUE(at::equal(given.values[i], rounded(parameters[i]))) << "parameter " << i;
  });
}

// Ranks choose one init tier together, although one of them has less free memory than the others.
// Ranks are threads of this process, each with a device of its own.

constexpr int kWorld = 3;
constexpr int kHogged = 1;  // another program uses this rank's device
constexpr int kStage = 2;
constexpr Bytes kDevice = 512_MiB;

// Values of 22.5 MiB, beside which an engine at stage 2 with AdamW takes 30 MiB on every rank, and
// 128 MiB have to stay free.
constexpr int kBlocks = 12;

struct Crowded {
  ModelRuntime runtime;
  std::unique_ptr<device::Memory> taken;  // stands for another program's memory
};

Crowded runtime_with(Bytes free, const std::shared_ptr<comm::Collectives>& collectives) {
  Crowded crowded{make_runtime(kHere, 1, collectives), nullptr};
  auto device = std::make_shared<device::LimitedDevice>(kDevice);
  crowded.taken = device->allocate_uncharged(kDevice - free);
  crowded.runtime.device = std::move(device);
  return crowded;
}

struct Outcome {  // by rank
  std::vector<std::string> tiers;
  std::vector<std::string> reasons;  // of a rank that refused, its error's text
};

// A start in which the hogged rank has `free` bytes and the others have 256 MiB.
Outcome start_beside(Bytes free, const std::vector<Net>& nets, bool looks_at_values = false) {
  Outcome outcome{std::vector<std::string>(kWorld), std::vector<std::string>(kWorld)};
  const std::vector<at::Tensor> expected = values_of(nets[0]);
  run_ranks(kWorld, [&](const std::shared_ptr<comm::Collectives>& collectives) {
    const auto rank = static_cast<std::size_t>(collectives->rank());
    const Crowded crowded =
        runtime_with(collectives->rank() == kHogged ? free : 256_MiB, collectives);
    try {
      ShardedModel model(describe_module(*nets[rank]).input, config_of(kStage, kWorld),
                         engine::UpdateRule::kAdamW, crowded.runtime, "engine");
      outcome.tiers[rank] = model.engine().init_report().tier;
      outcome.reasons[rank] = model.engine().init_report().reason;
      if (looks_at_values) {
        const std::vector<at::Tensor> values = values_in(model);
        for (std::size_t i = 0; i < expected.size(); ++i)
          EXPECT_TRUE(at::equal(values[i], expected[i].to(at::kBFloat16).to(at::kFloat))) << i;
      }
      model.destroy(false);
    } catch (const OutOfMemoryError& error) {
      outcome.tiers[rank] = "refused";
      outcome.reasons[rank] = error.what();
    }
  });
  return outcome;
}

TEST(InitChoice, TakesTheFastestWayWhereEveryRankHasRoom) {
  const Outcome outcome = start_beside(256_MiB, make_nets(kWorld, kBlocks));
  EXPECT_THAT(outcome.tiers, Each("device_copy"));
}

TEST(InitChoice, AllRanksTakeTheLowerWayWhereOneHasLessRoom) {
  const std::vector<Net> nets = make_nets(kWorld, kBlocks);
  for (const at::Tensor& p : nets[2]->parameters()) p.detach().mul_(-1.0);  // rank 0's win
  const Outcome outcome = start_beside(128_MiB + 20_MiB, nets, true);
  EXPECT_THAT(outcome.tiers, Each("device_grow"));
  EXPECT_THAT(outcome.reasons, Each(AllOf(HasSubstr("device_copy lacks"), HasSubstr("on rank 1"),
                                          HasSubstr("least is free on rank 1: 148 MiB"))));
}

TEST(InitChoice, AllRanksRefuseBeforeAnythingMovesWhatOneHasNoRoomFor) {
  const std::vector<Net> nets = make_nets(kWorld, kBlocks);
  const std::vector<at::Tensor> before = values_of(nets[0]);
  const Outcome outcome = start_beside(64_MiB, nets);
  EXPECT_THAT(outcome.tiers, Each("refused"));
  EXPECT_THAT(outcome.reasons, Each(AllOf(HasSubstr("the model does not fit: rank 1 lacks"),
                                          HasSubstr("Nothing has been moved"))));
  for (const Net& net : nets) {
    const std::vector<at::Tensor> after = values_of(net);
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(before[i], after[i]));
    for (const at::Tensor& p : net->parameters()) EXPECT_TRUE(p.requires_grad());
  }
}

std::string fingerprint_of(const at::Tensor& values) {
  device::CpuDevice device;
  ThreadPool threads(2);
  Fingerprints fingerprints(device, threads);
  std::string found(block_count(Bytes(values.nbytes())) * kFingerprintBytes, '\0');
  fingerprints.add({static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()}, true,
                   found);
  fingerprints.flush();
  return found;
}

at::Tensor random_bytes(std::int64_t count) {
  at::manual_seed(7);
  return at::randint(0, 256, {count}, at::TensorOptions().dtype(at::kByte));
}

TEST(Fingerprints, GivesEqualBytesEqualBits) {
  for (const std::int64_t count : {1, 7, 8, 4095, 4096, 10'001}) {
    const at::Tensor values = random_bytes(count);
    EXPECT_EQ(fingerprint_of(values), fingerprint_of(values.clone()));
  }
}

TEST(Fingerprints, SeesEveryByte) {
  const at::Tensor values = random_bytes(1003);
  const std::string whole = fingerprint_of(values);
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    for (const int flip : {0x01, 0x80}) {
      at::Tensor changed = values.clone();
      changed[i].bitwise_xor_(flip);
      EXPECT_NE(fingerprint_of(changed), whole) << "byte " << i << ", bit " << flip;
    }
  }
}

TEST(Fingerprints, SeesEqualValuesChangePlaces) {
  // Words that differ in their highest bits alone, at distances that are powers of two.
  at::Tensor values = at::zeros({512}, at::TensorOptions().dtype(at::kLong));
  values[0].fill_(std::int64_t{1} << 62);
  const std::string whole = fingerprint_of(values);
  for (std::int64_t other = 1; other < 512; other *= 2) {
    const at::Tensor moved = values.roll({other});
    EXPECT_NE(fingerprint_of(moved), whole) << "moved by " << other;
  }
}

TEST(Fingerprints, TellsWhichBlockDiffers) {
  const at::Tensor values = random_bytes(3 * kBlock.value);
  at::Tensor changed = values.clone();
  changed[kBlock.value + 5].bitwise_xor_(1);
  const std::string ours = fingerprint_of(values);
  const std::string theirs = fingerprint_of(changed);
  const auto block = [](const std::string& all, std::size_t i) {
    return all.substr(i * kFingerprintBytes, kFingerprintBytes);
  };
  EXPECT_EQ(block(ours, 0), block(theirs, 0));
  EXPECT_NE(block(ours, 1), block(theirs, 1));
  EXPECT_EQ(block(ours, 2), block(theirs, 2));
}

TEST(Fingerprints, DoesNotDependOnTheAddressOrTheType) {
  const at::Tensor values = at::randn({777}).to(at::kBFloat16);
  const at::Tensor shifted = at::cat({values.narrow(0, 0, 1), values}).narrow(0, 1, 777);
  EXPECT_EQ(fingerprint_of(shifted), fingerprint_of(values));
  EXPECT_EQ(fingerprint_of(values.view(at::kShort)), fingerprint_of(values));
  EXPECT_EQ(fingerprint_of(at::scalar_tensor(3.0)), fingerprint_of(at::full({1}, 3.0)));
}

}  // namespace
}  // namespace strata::torch

// Values that ranks read where rank 0 has them. Ranks are threads of this process.
#include "strata/torch/start/rank_0_values.h"

#include <ATen/ops/from_blob.h>
#include <gmock/gmock.h>
#include <sys/mman.h>

#include "torch/live_engines.h"

namespace strata::torch {
namespace {

using testing::bring_in;
using testing::gathered_at_the_end;
using testing::Given;
using testing::on_live_engines;
using testing::rounded;
using testing::values_in;

bool take(ShardedModel& model, const std::vector<ModelParameter>& parameters,
          const std::vector<int>& on_host, Bytes copied_most = 4_MiB) {
  const OriginalValues originals(parameters);
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
      EXPECT_THAT(model.engine().init_report().reason(), ::testing::HasSubstr(reason));
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
        model.engine().init_report().reason(),
        ::testing::AllOf(::testing::HasSubstr("reading the weights failed on rank"),
                         ::testing::HasSubstr("/mem"), ::testing::HasSubstr("Bad address")));
    const Given given = bring_in(model, parameters);
    for (std::size_t i = 0; i < parameters.size(); ++i)
      EXPECT_TRUE(at::equal(given.values[i], rounded(parameters[i]))) << "parameter " << i;
  });
}

}  // namespace
}  // namespace strata::torch

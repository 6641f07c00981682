// The conformance suite of the Collectives seam on c10d's gloo: alone, and as the transport of bulk
// in DeviceCollectives, whose device is the CPU here, also with peers for gathers or reductions. It
// is a Python module, since Python makes gloo's process groups; ranks are threads of one process,
// each with its own group.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/collectives_conformance.h"
#include "strata/comm/agreement.h"
#include "strata/comm/combined/combined_collectives.h"
#include "strata/comm/host/host_collectives.h"
#include "strata/comm/peer/peer_collectives.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/ranks/c10d_collectives.h"

namespace strata::comm::conformance {
namespace {

namespace py = pybind11;

// (rank, world size, timeout in seconds, a number that tells groups apart) -> (c10d backend, store)
using MakeBackend =
    std::function<std::pair<c10::intrusive_ptr<c10d::Backend>, c10::intrusive_ptr<c10d::Store>>(
        int, int, double, int)>;

MakeBackend make_backend;  // of the running suite: GoogleTest's parameters are made before main
int groups_made = 0;

std::vector<std::string> run_gloo(int world_size, std::chrono::milliseconds timeout,
                                  const RankBody& body) {
  const int group = ++groups_made;
  const double seconds = std::chrono::duration<double>(timeout).count();
  const auto make = [&](int rank) {
    const py::gil_scoped_acquire acquire;
    auto [backend, store] = make_backend(rank, world_size, seconds, group);
    return torch::make_c10d_collectives(std::make_shared<torch::GroupBackend>(std::move(backend)),
                                        std::move(store), std::to_string(group), "gloo");
  };
  return run_as_threads(world_size, make, body);
}

// Makes one rank's collectives from those of the bulk and the control plane that ranks share.
using Combine = std::function<std::unique_ptr<Collectives>(std::unique_ptr<Collectives> bulk,
                                                           std::shared_ptr<Collectives> control)>;

std::vector<std::string> run_on_device(const Combine& combine, int world_size,
                                       std::chrono::milliseconds timeout, const RankBody& body) {
  const int group = ++groups_made;
  const double seconds = std::chrono::duration<double>(timeout).count();
  CommOptions options;
  options.timeout = timeout;
  LocalGroup group_of_control(world_size, options);
  const auto make = [&](int rank) {
    const std::shared_ptr<Collectives> control = group_of_control.rank(rank);
    torch::DeviceGroup parts;
    parts.device = torch::make_device(parts.place, 1);
    parts.control = control;
    parts.id = std::to_string(group);
    parts.name = "gloo";
    if (world_size > 1) {
      const py::gil_scoped_acquire acquire;
      auto [backend, store] = make_backend(rank, world_size, seconds, group);
      parts.bulk = std::make_shared<torch::GroupBackend>(std::move(backend));
      parts.store = std::move(store);
    }
    return combine(torch::make_device_collectives(std::move(parts)), control);
  };
  return run_as_threads(world_size, make, body);
}

std::vector<std::string> run_device(int world_size, std::chrono::milliseconds timeout,
                                    const RankBody& body) {
  return run_on_device([](auto bulk, auto) { return bulk; }, world_size, timeout, body);
}

// Peers beside it carry gathers, or reductions.
Backend split_backend(bool peers_gather) {
  return {peers_gather ? "peers_gather" : "peers_reduce",
          [peers_gather](int world_size, std::chrono::milliseconds timeout, const RankBody& body) {
            const auto combine = [&](std::shared_ptr<Collectives> bulk,
                                     std::shared_ptr<Collectives> control) {
              CommOptions options;
              options.timeout = timeout;
              std::shared_ptr<Collectives> peers = make_peer_collectives(
                  torch::make_device(c10::DeviceType::CPU, 1), std::move(control), options);
              if (!peers_gather) std::swap(peers, bulk);
              return make_split_collectives(std::move(peers), std::move(bulk));
            };
            return run_on_device(combine, world_size, timeout, body);
          }};
}

INSTANTIATE_TEST_SUITE_P(Device, CollectivesMoveData,
                         testing::Values(Backend{"device", run_device}));
INSTANTIATE_TEST_SUITE_P(Device, CollectivesReportErrors,
                         testing::Values(Backend{"device", run_device}));
INSTANTIATE_TEST_SUITE_P(Split, CollectivesMoveData,
                         testing::Values(split_backend(true), split_backend(false)));
INSTANTIATE_TEST_SUITE_P(Split, CollectivesReportErrors,
                         testing::Values(split_backend(true), split_backend(false)));
INSTANTIATE_TEST_SUITE_P(Split, OneSidedGathers, testing::Values(split_backend(true)));
INSTANTIATE_TEST_SUITE_P(Gloo, CollectivesMoveData, testing::Values(Backend{"gloo", run_gloo}));
INSTANTIATE_TEST_SUITE_P(Gloo, CollectivesReportErrors, testing::Values(Backend{"gloo", run_gloo}));

// Rank 1 comes to rank 0's reduction and ends instead; by then rank 0's collectives are gone, too.
TEST(GlooWorks, FailAsTheirCollectivesDidWhereTheyOutliveThem) {
  constexpr double kDeadline = 15.0;  // seconds; the test waits them out: no rank answers rank 0
  const int group = ++groups_made;
  LocalGroup ranks(2);
  const auto body = [&](Collectives& c) -> std::string {
    c10::intrusive_ptr<c10d::Backend> backend;
    c10::intrusive_ptr<c10d::Store> store;
    {
      const py::gil_scoped_acquire acquire;
      std::tie(backend, store) = make_backend(c.rank(), 2, kDeadline, group);
    }
    const auto source = c.allocate("source", 8_B);
    float result = 0;
    const Reduction reduction{source.get(),          0_B,  DType::kFloat32,
                              std::span(&result, 1), 1.0F, false};
    if (c.rank() == 1) {
      std::uint64_t hash = std::hash<std::string>{}(describe_reduction(reduction, 2, "one").what);
      at::Tensor mine = at::from_blob(&hash, {sizeof(hash)}, at::kByte);
      at::Tensor all = at::empty({2 * static_cast<std::int64_t>(sizeof(hash))}, at::kByte);
      backend->_allgather_base(all, mine)->wait();
      c.barrier();
      return "gone";
    }
    auto gloo = torch::make_c10d_collectives(std::make_shared<torch::GroupBackend>(backend), store,
                                             std::to_string(group), "gloo");
    const auto work = gloo->reduce_scatter(reduction, "one");
    gloo.reset();
    backend.reset();
    c.barrier();
    try {
      work->wait();
    } catch (const CommError& error) {
      return error.what();
    }
    return "no error";
  };
  const auto results = run_as_threads(
      2, [&](int rank) { return ranks.rank(rank); }, body);
  EXPECT_THAT(results[0], testing::HasSubstr("rank 0: reduction of 'one'"));
  EXPECT_EQ(results[1], "gone");
}

// 0 when all tests that `filter` names passed; their output goes to stdout.
int run(MakeBackend make, const std::string& filter) {
  make_backend = std::move(make);
  std::vector<std::string> words{"c10d_conformance", "--gtest_filter=" + filter, "--gtest_brief=1"};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  int count = static_cast<int>(arguments.size());
  testing::InitGoogleTest(&count, arguments.data());
  int result = 0;
  {
    const py::gil_scoped_release release;
    result = RUN_ALL_TESTS();
  }
  make_backend = nullptr;
  return testing::UnitTest::GetInstance()->successful_test_count() > 0 ? result : 1;
}

}  // namespace

PYBIND11_MODULE(c10d_conformance, module) {
  module.def("run", &run);
}

}  // namespace strata::comm::conformance

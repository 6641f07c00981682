#include "comm/collectives_conformance.h"
#include "strata/comm/combined/combined_collectives.h"
#include "strata/comm/host/host_collectives.h"
#include "strata/device/cpu_device.h"

namespace strata::comm::conformance {
namespace {

// Collectives that run_as_threads() owns.
class Shared final : public Collectives {
 public:
  explicit Shared(std::shared_ptr<Collectives> all)
      : Collectives(all->rank(), all->traits()), all_(std::move(all)) {}
  std::string_view name() const override { return all_->name(); }
  std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) override {
    return all_->allocate(std::move(name), bytes);
  }
  std::unique_ptr<Work> all_gather(const SliceMap& slices, std::span<std::byte> flat,
                                   std::string_view tag) override {
    return all_->all_gather(slices, flat, tag);
  }
  std::unique_ptr<Work> reduce_scatter(const Reduction& reduction, std::string_view tag) override {
    return all_->reduce_scatter(reduction, tag);
  }
  std::unique_ptr<Work> exchange(const Exchange& exchange, std::string_view tag) override {
    return all_->exchange(exchange, tag);
  }
  void all_reduce(std::span<double> values, ReduceOp op) override { all_->all_reduce(values, op); }
  void broadcast(std::span<std::byte> bytes, int root) override { all_->broadcast(bytes, root); }
  std::vector<std::string> all_gather_text(const std::string& text) override {
    return all_->all_gather_text(text);
  }
  void barrier() override { all_->barrier(); }
  void announce_departure(std::string_view words) override {
    Collectives::announce_departure(words);
    all_->announce_departure(words);
  }

  void require_usable() override { all_->require_usable(); }
  void end(Ending ending, std::string_view reason) noexcept override { all_->end(ending, reason); }

 private:
  std::shared_ptr<Collectives> all_;
};

std::vector<std::string> run_joint(int world_size, std::chrono::milliseconds timeout,
                                   const RankBody& body) {
  CommOptions options;
  options.timeout = timeout;
  LocalGroup group(world_size, options);
  const auto rank = [&](int r) -> std::unique_ptr<Collectives> {
    return std::make_unique<Shared>(
        make_joint_gathers(group.rank(r), std::make_shared<device::CpuDevice>()));
  };
  return run_as_threads(world_size, rank, body);
}

Backend joint_backend() {
  return {"joint", run_joint};
}

INSTANTIATE_TEST_SUITE_P(Joint, CollectivesMoveData, testing::Values(joint_backend()));
INSTANTIATE_TEST_SUITE_P(Joint, CollectivesReportErrors, testing::Values(joint_backend()));
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OneSidedGathers);

TEST(JointGathers, NameRanksThatGatherDifferentThings) {
  const auto results = run_joint(2, std::chrono::seconds(60), [](Collectives& c) {
    std::vector<std::byte> flat(2 * 64);
    try {
      c.all_gather({nullptr, 0_B, 0_B, 64_B}, flat, c.rank() == 0 ? "first" : "second")->wait();
    } catch (const CommError& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  });
  for (const std::string& result : results) {
    EXPECT_THAT(result, testing::HasSubstr("rank 0: all-gather of 'first'"));
    EXPECT_THAT(result, testing::HasSubstr("rank 1: all-gather of 'second'"));
  }
}

}  // namespace
}  // namespace strata::comm::conformance

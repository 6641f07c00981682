// Where a model lies, and the threads with which a rank works on host memory.
#include "strata/torch/base/placement.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "strata/base/error.h"

namespace strata::torch {
namespace {

using ::testing::HasSubstr;

using engine::DeviceKind;

template <typename Call>
std::string error_of(Call&& call) {
  try {
    std::forward<Call>(call)();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Placement, FindsTheDeviceOfTheParameters) {
  EXPECT_EQ(device_of({}), std::nullopt);
  EXPECT_EQ(device_of({{"a", at::ones({2})}, {"b", at::ones({3})}}), c10::Device(at::kCPU));
}

TEST(Placement, RefusesParametersWithoutValues) {
  const at::Tensor meta = at::empty({2}, at::TensorOptions().device(at::kMeta));
  EXPECT_THAT(error_of([&] {
                device_of({{"a", at::ones({2})}, {"layer.weight", meta}});
              }),
              HasSubstr("found 'layer.weight'"));
}

TEST(Placement, KeepsAModelOnTheHostWhereTheConfigurationSaysSo) {
  EXPECT_TRUE(choose_device(DeviceKind::kCpu, c10::Device(at::kCPU), 0).is_cpu());
  EXPECT_TRUE(choose_device(DeviceKind::kCpu, c10::Device(at::kCUDA, 0), 0).is_cpu());
}

TEST(Placement, GoesToTheGpuOfTheRankWhereThereIsOne) {
  const c10::Device chosen = choose_device(DeviceKind::kAuto, c10::Device(at::kCPU), 0);
  EXPECT_EQ(chosen.is_cuda(), usable_gpus() > 0);
  EXPECT_EQ(choose_device(DeviceKind::kAuto, std::nullopt, 0), chosen);
}

TEST(Placement, SaysWhatIsMissingWhereAGpuIsAskedFor) {
  if (usable_gpus() > 0) {
    EXPECT_EQ(choose_device(DeviceKind::kCuda, std::nullopt, 0), c10::Device(at::kCUDA, 0));
    EXPECT_THAT(usable_gpus() == 1
                    ? std::string("LOCAL_RANK 99")  // the only GPU is every rank's own
                    : error_of([] { choose_device(DeviceKind::kCuda, std::nullopt, 99); }),
                HasSubstr("LOCAL_RANK 99"));
    return;
  }
  EXPECT_THAT(error_of([] { choose_device(DeviceKind::kCuda, std::nullopt, 0); }),
              ::testing::AllOf(HasSubstr("\"cuda\" is asked for"), HasSubstr("torch sees 0 GPUs")));
  EXPECT_THAT(error_of([] { choose_device(DeviceKind::kAuto, c10::Device(at::kCUDA, 1), 0); }),
              HasSubstr("the model is on cuda:1"));
}

TEST(Placement, WrapsMemoryOfTheEngine) {
  float values[] = {1.0F, 2.0F, 3.0F};
  const at::Tensor tensor = tensor_over(values, 3, at::kFloat, c10::Device(at::kCPU));
  tensor.mul_(2.0);
  EXPECT_THAT(values, ::testing::ElementsAre(2.0F, 4.0F, 6.0F));
}

// Sets a launcher's variable about this host for the time of a test.
class Launcher {
 public:
  explicit Launcher(const char* ranks_here, const char* name = "LOCAL_WORLD_SIZE") : name_(name) {
    if (const char* const text = std::getenv(name_)) before_ = text;
    ranks_here == nullptr ? ::unsetenv(name_) : ::setenv(name_, ranks_here, 1);
  }
  ~Launcher() { before_ ? ::setenv(name_, before_->c_str(), 1) : ::unsetenv(name_); }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

TEST(HostThreads, AreWhatTheConfigurationSays) {
  EXPECT_EQ(host_threads(3, 1), 3);
  EXPECT_EQ(host_threads(100, 1000), 100);
}

TEST(HostThreads, OfARankAreItsPartOfTheHostsCores) {
  const Launcher launcher(nullptr);
  EXPECT_EQ(host_threads(std::nullopt, 1), std::min(usable_cores(), kMostHostThreads));
  EXPECT_EQ(host_threads(std::nullopt, 1 << 20), 1);
}

TEST(HostThreads, DoNotDependOnWhatTorchWouldTake) {
  const Launcher launcher("1");
  ::setenv("OMP_NUM_THREADS", "1", 1);
  EXPECT_EQ(host_threads(std::nullopt, 64), std::min(usable_cores(), kMostHostThreads));
}

TEST(HostThreads, OfTheRankThatReadsAllAreWhatTheOthersLeave) {
  const Launcher launcher(nullptr);
  EXPECT_EQ(reference_threads(3, 2), 3);
  for (const int world : {1, 2, 4, 1 << 20}) {
    const int share = host_threads(std::nullopt, world);
    EXPECT_GE(reference_threads(std::nullopt, world), share);
    EXPECT_LE(reference_threads(std::nullopt, world), usable_cores());
  }
  const int alone = std::min(usable_cores(), 2 * kMostHostThreads);
  EXPECT_EQ(reference_threads(std::nullopt, 1), alone);
}

TEST(HostThreads, ReadWithinBounds) {
  EXPECT_EQ(reading_options(1).threads, 4);
  EXPECT_EQ(reading_options(16).threads, 12);  // the others queue copies and map memory
  EXPECT_EQ(reading_options(64).threads, 16);
}

TEST(HostThreads, AreBoundToWhatIsThisRanksAlone) {
  const auto cores = [](const char* rank, const char* ranks, int threads) {
    const Launcher of_rank(rank, "LOCAL_RANK");
    const Launcher of_host(ranks);
    return host_cores(threads);
  };
  EXPECT_TRUE(cores(nullptr, "2", 2).empty());
  EXPECT_TRUE(cores("0", nullptr, 2).empty());
  EXPECT_TRUE(cores("first", "2", 2).empty());
  EXPECT_TRUE(cores("0", "1", 2).empty());
  const std::vector<int> first = cores("0", "2", 2);
  for (const int core : cores("1", "2", 2)) EXPECT_EQ(std::ranges::count(first, core), 0);
}

TEST(HostThreads, CountTheRanksOfThisHostAlone) {
  EXPECT_GE(usable_cores(), 1);
  {
    const Launcher launcher("4");
    EXPECT_EQ(ranks_of_host(16), 4);
    EXPECT_EQ(ranks_of_host(2), 2);  // a group of some of the launcher's ranks
  }
  for (const char* nonsense : {"", "0", "-1", "four", "4 "}) {
    const Launcher launcher(nonsense);
    EXPECT_EQ(ranks_of_host(16), 16) << "'" << nonsense << "'";
  }
}

}  // namespace
}  // namespace strata::torch

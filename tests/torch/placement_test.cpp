#include "strata/torch/base/placement.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>

#include "strata/base/error.h"

namespace strata::torch {
namespace {

using engine::DeviceKind;
using ::testing::HasSubstr;

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

}  // namespace
}  // namespace strata::torch

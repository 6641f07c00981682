#include "strata/torch/fingerprint.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>

#include "strata/device/cpu_device.h"

namespace strata::torch {
namespace {

constexpr Bytes kBlock = 4_KiB;

std::string fingerprint_of(FingerprintMethod method, const at::Tensor& values) {
  device::CpuDevice device;
  ThreadPool threads(2);
  Fingerprints fingerprints(method, kBlock, device, threads);
  std::string found(block_count(Bytes(values.nbytes()), kBlock) * kFingerprintBytes, '\0');
  fingerprints.add(values, found);
  fingerprints.flush();
  return found;
}

at::Tensor random_bytes(std::int64_t count) {
  at::manual_seed(7);
  return at::randint(0, 256, {count}, at::TensorOptions().dtype(at::kByte));
}

class EachMethod : public testing::TestWithParam<FingerprintMethod> {};
INSTANTIATE_TEST_SUITE_P(Fingerprints, EachMethod,
                         testing::Values(FingerprintMethod::kHost, FingerprintMethod::kAnywhere));

TEST_P(EachMethod, GivesEqualBytesEqualBits) {
  for (const std::int64_t count : {1, 7, 8, 4095, 4096, 10'001}) {
    const at::Tensor values = random_bytes(count);
    EXPECT_EQ(fingerprint_of(GetParam(), values), fingerprint_of(GetParam(), values.clone()));
  }
}

TEST_P(EachMethod, SeesEveryByte) {
  const at::Tensor values = random_bytes(1003);
  const std::string whole = fingerprint_of(GetParam(), values);
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    for (const int flip : {0x01, 0x80}) {
      at::Tensor changed = values.clone();
      changed[i].bitwise_xor_(flip);
      EXPECT_NE(fingerprint_of(GetParam(), changed), whole) << "byte " << i << ", bit " << flip;
    }
  }
}

TEST_P(EachMethod, SeesEqualValuesChangePlaces) {
  // Words that differ in their highest bits alone, at distances that are powers of two.
  at::Tensor values = at::zeros({512}, at::TensorOptions().dtype(at::kLong));
  values[0].fill_(std::int64_t{1} << 62);
  const std::string whole = fingerprint_of(GetParam(), values);
  for (std::int64_t other = 1; other < 512; other *= 2) {
    const at::Tensor moved = values.roll({other});
    EXPECT_NE(fingerprint_of(GetParam(), moved), whole) << "moved by " << other;
  }
}

TEST_P(EachMethod, TellsWhichBlockDiffers) {
  const at::Tensor values = random_bytes(3 * kBlock.value);
  at::Tensor changed = values.clone();
  changed[kBlock.value + 5].bitwise_xor_(1);
  const std::string ours = fingerprint_of(GetParam(), values);
  const std::string theirs = fingerprint_of(GetParam(), changed);
  const auto block = [](const std::string& all, std::size_t i) {
    return all.substr(i * kFingerprintBytes, kFingerprintBytes);
  };
  EXPECT_EQ(block(ours, 0), block(theirs, 0));
  EXPECT_NE(block(ours, 1), block(theirs, 1));
  EXPECT_EQ(block(ours, 2), block(theirs, 2));
}

TEST_P(EachMethod, DoesNotDependOnTheAddressOrTheType) {
  const at::Tensor values = at::randn({777}).to(at::kBFloat16);
  const at::Tensor shifted = at::cat({values.narrow(0, 0, 1), values}).narrow(0, 1, 777);
  EXPECT_EQ(fingerprint_of(GetParam(), shifted), fingerprint_of(GetParam(), values));
  EXPECT_EQ(fingerprint_of(GetParam(), values.view(at::kShort)),
            fingerprint_of(GetParam(), values));
  EXPECT_EQ(fingerprint_of(GetParam(), at::scalar_tensor(3.0)),
            fingerprint_of(GetParam(), at::full({1}, 3.0)));
}

}  // namespace
}  // namespace strata::torch

#include "strata/torch/start/fingerprint.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>

#include "strata/device/cpu_device.h"

namespace strata::torch {
namespace {

constexpr Bytes kBlock = 4_KiB;

std::string fingerprint_of(const at::Tensor& values) {
  device::CpuDevice device;
  ThreadPool threads(2);
  Fingerprints fingerprints(kBlock, device, threads);
  std::string found(block_count(Bytes(values.nbytes()), kBlock) * kFingerprintBytes, '\0');
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

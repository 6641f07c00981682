#include "strata/kernels/fingerprint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "strata/base/thread_pool.h"

namespace strata::kernels {
namespace {

std::vector<std::byte> random_bytes(std::size_t count) {
  std::mt19937 random(5);
  std::vector<std::byte> bytes(count);
  std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<std::byte>(random()); });
  return bytes;
}

TEST(Fingerprint, EveryBitCounts) {
  auto bytes = random_bytes(107);
  const Fingerprint before = fingerprint(bytes, nullptr);
  for (std::byte& byte : bytes) {
    for (int bit = 0; bit < 8; ++bit) {
      byte ^= std::byte{1} << bit;
      const Fingerprint changed = fingerprint(bytes, nullptr);
      EXPECT_NE(changed.first, before.first);
      EXPECT_NE(changed.second, before.second);
      byte ^= std::byte{1} << bit;
    }
  }
}

TEST(Fingerprint, PlacesCount) {
  auto bytes = random_bytes(64);
  const Fingerprint before = fingerprint(bytes, nullptr);
  std::swap_ranges(bytes.begin(), bytes.begin() + 8, bytes.begin() + 32);
  EXPECT_NE(fingerprint(bytes, nullptr), before);
  const std::vector<std::byte> zeroes(16);
  EXPECT_EQ(fingerprint(zeroes, nullptr), Fingerprint());
}

TEST(Fingerprint, SignsOfMirroredNumbersDoNotCancel) {
  // Values whose high bits alone differ, at two places.
  std::vector<std::uint64_t> words(4, 0x3f80000000000000ULL);
  const auto bytes = [&] { return std::as_bytes(std::span(words)); };
  const Fingerprint before = fingerprint(bytes(), nullptr);
  words[0] ^= 1ULL << 63;
  words[1] ^= 1ULL << 63;
  EXPECT_NE(fingerprint(bytes(), nullptr).first, before.first);
  EXPECT_NE(fingerprint(bytes(), nullptr).second, before.second);
}

TEST(Fingerprint, ThreadsComeToTheSameBits) {
  const auto bytes = random_bytes((3U << 20U) + 5);
  ThreadPool pool(3);
  EXPECT_EQ(fingerprint(bytes, &pool), fingerprint(bytes, nullptr));
}

}  // namespace
}  // namespace strata::kernels

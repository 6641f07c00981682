#include "strata/kernels/fingerprint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
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
}

TEST(Fingerprint, IsTheSumOfMixedWords) {
  for (const std::size_t count : {0U, 1U, 7U, 8U, 63U, 64U, 65U, 200U, 4099U, 10'000U}) {
    const auto bytes = random_bytes(count + 3);
    for (const std::size_t offset : {0U, 3U}) {
      const auto run = std::span(bytes).subspan(offset, count);
      Fingerprint expected;
      for (std::size_t i = 0; i * 8 < count; ++i) {
        std::uint64_t word = 0;
        std::memcpy(&word, run.data() + i * 8, std::min<std::size_t>(8, count - i * 8));
        expected.first += mixed_word(word, i).first;
        expected.second += mixed_word(word, i).second;
      }
      EXPECT_EQ(fingerprint(run, nullptr), expected) << count << " bytes at " << offset;
    }
  }
}

TEST(Fingerprint, OfBytesThatAreCopiedIsTheSameAndTheyArrive) {
  constexpr std::size_t kLine = 64;
  for (const std::size_t count : {0U, 1U, 8U, 63U, 64U, 129U, 4096U, 100'003U}) {
    const auto bytes = random_bytes(count);
    std::vector<std::byte> memory(count + 2 * kLine);
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    for (const std::size_t offset : {0U, 1U, 8U}) {  // from where a line begins
      std::fill(memory.begin(), memory.end(), std::byte{0xA5});
      std::byte* const target = memory.data() + (kLine - address % kLine) % kLine + offset;
      EXPECT_EQ(fingerprint_and_copy(target, bytes), fingerprint(bytes, nullptr));
      EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), target)) << count << ", " << offset;
      EXPECT_EQ(target[count], std::byte{0xA5});
    }
  }
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

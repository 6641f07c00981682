// 128 bits that tell runs of bytes apart, from sums over 8-byte words: unlike hashes that go
// through their input in order, any number of threads, on any device, come to the same bits.
// A word's halves are each added to a key of its place and multiplied with each other, twice, with
// other keys: the NH hash (Black et al., "UMAC", CRYPTO 1999), which needs one multiplication of 32
// bits a sum, so that memory bandwidth is the limit. It detects accidents; it does not resist an
// attacker who searches for collisions.
// Pure; safe everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace strata {
class ThreadPool;
}

namespace strata::kernels {

struct Fingerprint {
  std::uint64_t first = 0;
  std::uint64_t second = 0;
  bool operator==(const Fingerprint&) const = default;
};

// The keys of word `index` are (index + 1) times these.
inline constexpr std::uint64_t kFirstKey = 0x6a09e667f3bcc909ULL;
inline constexpr std::uint64_t kSecondKey = 0x3c6ef372fe94f82bULL;

inline constexpr std::uint64_t multiplied_halves(std::uint64_t word, std::uint64_t key) {
  const auto low = static_cast<std::uint32_t>(word) + static_cast<std::uint32_t>(key);
  const auto high = static_cast<std::uint32_t>(word >> 32) + static_cast<std::uint32_t>(key >> 32);
  return static_cast<std::uint64_t>(low) * high;
}

// The summand of word `index` of a run. Bytes that are missing at the end are zero.
inline constexpr Fingerprint mixed_word(std::uint64_t word, std::uint64_t index) {
  return {multiplied_halves(word, (index + 1) * kFirstKey),
          multiplied_halves(word, (index + 1) * kSecondKey)};
}

Fingerprint fingerprint(std::span<const std::byte> bytes, ThreadPool* pool);

// The same in one thread, and copies the bytes to `target` on the way. No slower than the copy
// alone.
Fingerprint fingerprint_and_copy(std::byte* target, std::span<const std::byte> bytes);

}  // namespace strata::kernels

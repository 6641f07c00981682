// 128 bits that tell runs of bytes apart, from sums of mixed 8-byte words: unlike hashes that go
// through their input in order, any number of threads, on any device, come to the same bits.
// Against accidents, not against somebody who looks for equal ones.
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

// What word `index` of a run adds to its fingerprint; bytes that are missing at the end are zero.
// Two rounds of multiplication with odd numbers that depend on the place, high bits folded down
// between them, since products carry upwards only.
inline constexpr Fingerprint mixed_word(std::uint64_t word, std::uint64_t index) {
  std::uint64_t place = (index + 1) * 0x6a09e667f3bcc909ULL;
  place = (place ^ (place >> 32)) | 1;
  word = (word ^ (word >> 32)) * place;
  word ^= word >> 32;
  const std::uint64_t again = word * (place * 0x3c6ef372fe94f82bULL);
  return {word, again ^ (again >> 32)};
}

Fingerprint fingerprint(std::span<const std::byte> bytes, ThreadPool* pool);

}  // namespace strata::kernels

#include "strata/kernels/fingerprint.h"

#include <cstring>
#include <mutex>

#include "strata/base/thread_pool.h"

namespace strata::kernels {
namespace {

constexpr std::size_t kWord = sizeof(std::uint64_t);
constexpr std::int64_t kGrain = 1 << 17;  // words: 1 MiB

// Of the whole words [begin, end) of a run.
Fingerprint sum_words(const std::byte* bytes, std::size_t begin, std::size_t end) {
  Fingerprint sum;
  for (std::size_t i = begin; i < end; ++i) {
    std::uint64_t word;
    std::memcpy(&word, bytes + i * kWord, kWord);
    const Fingerprint mixed = mixed_word(word, i);
    sum.first += mixed.first;
    sum.second += mixed.second;
  }
  return sum;
}

}  // namespace

Fingerprint fingerprint(std::span<const std::byte> bytes, ThreadPool* pool) {
  const std::size_t whole = bytes.size() / kWord;
  Fingerprint sum;
  if (pool == nullptr || static_cast<std::int64_t>(whole) <= kGrain) {
    sum = sum_words(bytes.data(), 0, whole);
  } else {
    std::mutex mutex;
    pool->parallel_for(
        static_cast<std::int64_t>(whole), kGrain, [&](std::int64_t begin, std::int64_t end) {
          const Fingerprint part = sum_words(bytes.data(), static_cast<std::size_t>(begin),
                                             static_cast<std::size_t>(end));
          const std::lock_guard lock(mutex);
          sum.first += part.first;
          sum.second += part.second;
        });
  }
  if (whole * kWord == bytes.size()) return sum;
  std::uint64_t last = 0;
  std::memcpy(&last, bytes.data() + whole * kWord, bytes.size() - whole * kWord);
  const Fingerprint mixed = mixed_word(last, whole);
  return {sum.first + mixed.first, sum.second + mixed.second};
}

}  // namespace strata::kernels

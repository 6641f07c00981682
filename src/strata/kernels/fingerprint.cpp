#include "strata/kernels/fingerprint.h"

#include <cstring>
#include <mutex>

#include "strata/base/thread_pool.h"
#include "strata/kernels/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "strata/kernels/fingerprint.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/cache_control.h>

#include "strata/kernels/lanes-inl.h"

#ifndef STRATA_KERNELS_FINGERPRINT_WORDS_
#define STRATA_KERNELS_FINGERPRINT_WORDS_
namespace strata::kernels {
namespace {

constexpr std::size_t kWord = sizeof(std::uint64_t);
constexpr std::int64_t kGrain = 1 << 17;  // words: 1 MiB
constexpr std::size_t kLine = 64;
// Prefetchers of cores stop where a page ends; where many threads read, a core that asks for the
// page after it has one and a half times the bandwidth.
constexpr std::size_t kAhead = 4096;

void operator+=(Fingerprint& sum, const Fingerprint& part) {
  sum.first += part.first;
  sum.second += part.second;
}

// Fingerprint of the whole words [begin, end) of a run.
Fingerprint sum_words(const std::byte* bytes, std::size_t begin, std::size_t end) {
  Fingerprint sum;
  for (std::size_t i = begin; i < end; ++i) {
    std::uint64_t word;
    std::memcpy(&word, bytes + i * kWord, kWord);
    sum += mixed_word(word, i);
  }
  return sum;
}

// Fingerprint of the bytes after the last whole word.
Fingerprint last_word(std::span<const std::byte> bytes) {
  const std::size_t whole = bytes.size() / kWord;
  if (whole * kWord == bytes.size()) return {};
  std::uint64_t last = 0;
  std::memcpy(&last, bytes.data() + whole * kWord, bytes.size() - whole * kWord);
  return mixed_word(last, whole);
}

}  // namespace
}  // namespace strata::kernels
#endif  // STRATA_KERNELS_FINGERPRINT_WORDS_

HWY_BEFORE_NAMESPACE();
namespace strata::kernels::HWY_NAMESPACE {

// Both functions: of the whole words [begin, end) of a run; returns how many of them from `begin`
// on are done, and adds these to the sum. `target`: of the run, at a line of the cache; null: no
// copy.
#if STRATA_KERNELS_HAVE_LANES
template <bool kCopies>
HWY_INLINE std::size_t add_lines(const std::byte* bytes, std::byte* target, std::size_t begin,
                                 std::size_t end, Fingerprint& sum) {
  const hn::CappedTag<std::uint64_t, kLine / kWord> d;
  const hn::Repartition<std::uint32_t, decltype(d)> halves;
  using Vector = hn::Vec<decltype(d)>;
  constexpr std::size_t kWidth = hn::MaxLanes(d);
  constexpr std::size_t kLineWords = kLine / kWord;
  HWY_ALIGN std::uint64_t lanes[2][kWidth];
  for (std::size_t i = 0; i < kWidth; ++i) {
    lanes[0][i] = (begin + i + 1) * kFirstKey;
    lanes[1][i] = (begin + i + 1) * kSecondKey;
  }
  Vector first_key = hn::Load(d, lanes[0]);
  Vector second_key = hn::Load(d, lanes[1]);
  const Vector first_step = hn::Set(d, kWidth * kFirstKey);
  const Vector second_step = hn::Set(d, kWidth * kSecondKey);
  Vector first = hn::Zero(d);
  Vector second = hn::Zero(d);
  const auto multiplied = [&](Vector word, Vector key) HWY_ATTR {
    const auto sums = hn::Add(hn::BitCast(halves, word), hn::BitCast(halves, key));
    return hn::MulEven(sums, hn::BitCast(halves, hn::ShiftRight<32>(hn::BitCast(d, sums))));
  };
  std::size_t i = begin;
  for (; i + kLineWords <= end; i += kLineWords) {
    hwy::Prefetch(bytes + i * kWord + kAhead);
    for (std::size_t k = 0; k < kLineWords; k += kWidth) {
      const Vector word = hn::LoadU(d, elements<std::uint64_t>(bytes + (i + k) * kWord));
      if constexpr (kCopies) hn::Store(word, d, elements<std::uint64_t>(target + (i + k) * kWord));
      first = hn::Add(first, multiplied(word, first_key));
      second = hn::Add(second, multiplied(word, second_key));
      first_key = hn::Add(first_key, first_step);
      second_key = hn::Add(second_key, second_step);
    }
  }
  hn::Store(first, d, lanes[0]);
  hn::Store(second, d, lanes[1]);
  for (std::size_t k = 0; k < kWidth; ++k) sum += {lanes[0][k], lanes[1][k]};
  return i - begin;
}

std::size_t add_vectors(const std::byte* bytes, std::byte* target, std::size_t begin,
                        std::size_t end, Fingerprint* sum) {
  return target == nullptr ? add_lines<false>(bytes, target, begin, end, *sum)
                           : add_lines<true>(bytes, target, begin, end, *sum);
}
#else
std::size_t add_vectors(const std::byte*, std::byte*, std::size_t, std::size_t, Fingerprint*) {
  return 0;
}
#endif

}  // namespace strata::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace strata::kernels {

HWY_EXPORT(add_vectors);

namespace {

Fingerprint sum_run(const std::byte* bytes, std::byte* target, std::size_t begin, std::size_t end) {
  Fingerprint sum;
  const std::size_t done = HWY_DYNAMIC_DISPATCH(add_vectors)(bytes, target, begin, end, &sum);
  sum += sum_words(bytes, begin + done, end);
  if (target != nullptr) {
    const std::size_t at = (begin + done) * kWord;
    std::memcpy(target + at, bytes + at, end * kWord - at);
  }
  return sum;
}

}  // namespace

Fingerprint fingerprint(std::span<const std::byte> bytes, ThreadPool* pool) {
  const std::size_t whole = bytes.size() / kWord;
  Fingerprint sum = last_word(bytes);
  std::mutex mutex;
  for_chunks(
      pool, static_cast<std::int64_t>(whole), kGrain, [&](std::int64_t begin, std::int64_t end) {
        const Fingerprint part = sum_run(bytes.data(), nullptr, static_cast<std::size_t>(begin),
                                         static_cast<std::size_t>(end));
        const std::lock_guard lock(mutex);
        sum += part;
      });
  return sum;
}

Fingerprint fingerprint_and_copy(std::byte* target, std::span<const std::byte> bytes) {
  if (bytes.empty()) return {};
  if (reinterpret_cast<std::uintptr_t>(target) % kLine != 0) {
    std::memcpy(target, bytes.data(), bytes.size());
    return fingerprint(bytes, nullptr);
  }
  const std::size_t whole = bytes.size() / kWord;
  Fingerprint sum = last_word(bytes);
  sum += sum_run(bytes.data(), target, 0, whole);
  std::memcpy(target + whole * kWord, bytes.data() + whole * kWord, bytes.size() - whole * kWord);
  return sum;
}

}  // namespace strata::kernels
#endif  // HWY_ONCE

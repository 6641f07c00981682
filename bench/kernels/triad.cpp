#include "triad.h"

#include <algorithm>
#include <chrono>
#include <limits>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace strata::bench {
namespace {

constexpr std::int64_t kGrain = 65536;
constexpr float kScale = 3.0F;

void ordinary_stores(float* a, const float* b, const float* c, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) a[i] = b[i] + kScale * c[i];
}

// Stores bypass the caches, so that the lines of `a` are not read before they are overwritten.
void streaming_stores(float* a, const float* b, const float* c, std::size_t numel) {
#if defined(__SSE2__)
  const __m128 scale = _mm_set1_ps(kScale);
  const std::size_t misplaced = (reinterpret_cast<std::uintptr_t>(a) % 16) / sizeof(float);
  const std::size_t head = std::min(numel, misplaced == 0 ? 0 : 4 - misplaced);
  ordinary_stores(a, b, c, head);
  std::size_t i = head;
  for (; i + 4 <= numel; i += 4) {
    const __m128 product = _mm_mul_ps(scale, _mm_loadu_ps(c + i));
    _mm_stream_ps(a + i, _mm_add_ps(_mm_loadu_ps(b + i), product));
  }
  _mm_sfence();
  ordinary_stores(a + i, b + i, c + i, numel - i);
#else
  ordinary_stores(a, b, c, numel);
#endif
}

}  // namespace

Triad::Triad(std::size_t numel, ThreadPool& pool)
    : pool_(pool), a_(numel, 0.0F), b_(numel, 1.0F), c_(numel, 2.0F) {}

template <typename Store>
double Triad::seconds_of_one_round(Store store) {
  const auto start = std::chrono::steady_clock::now();
  pool_.parallel_for(static_cast<std::int64_t>(a_.size()), kGrain,
                     [&](std::int64_t begin, std::int64_t end) {
                       const auto at = static_cast<std::size_t>(begin);
                       store(a_.data() + at, b_.data() + at, c_.data() + at,
                             static_cast<std::size_t>(end - begin));
                     });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double Triad::measure(int rounds) {
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < rounds; ++i) {
    best = std::min(best, seconds_of_one_round(ordinary_stores));
    best = std::min(best, seconds_of_one_round(streaming_stores));
  }
  return static_cast<double>(3 * sizeof(float) * a_.size()) / best;
}

}  // namespace strata::bench

#include "strata/kernels/elementwise.h"

#include <algorithm>

#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/kernels/elementwise_loops.h"
#include "strata/kernels/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "strata/kernels/elementwise.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "strata/kernels/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::kernels::HWY_NAMESPACE {

// fp64 takes a whole vector for half a vector of fp32.
template <typename Target, typename Source>
using CastLanes =
    std::conditional_t<std::is_same_v<Target, double> || std::is_same_v<Source, double>,
                       hn::Half<hn::ScalableTag<float>>, hn::ScalableTag<float>>;

template <typename Target, typename Source>
void cast_range_of(std::byte* target, const std::byte* source, std::size_t numel) {
  std::size_t i = 0;
  if constexpr (kHaveLanes) {
    const CastLanes<Target, Source> d;
    for (; i + hn::Lanes(d) <= numel; i += hn::Lanes(d)) {
      const auto value = Lanes<Source>::load(d, source + i * sizeof(Source));
      Lanes<Target>::store(d, value, target + i * sizeof(Target));
    }
  }
  cast_scalars<Target, Source>(target, source, i, numel);
}

template <typename Target, typename Source>
void accumulate_range_of(std::byte* target, const std::byte* source, std::size_t numel) {
  std::size_t i = 0;
  if constexpr (kHaveLanes) {
    const hn::ScalableTag<float> d;
    for (; i + hn::Lanes(d) <= numel; i += hn::Lanes(d)) {
      std::byte* const to = target + i * sizeof(Target);
      const auto addend = Lanes<Source>::load(d, source + i * sizeof(Source));
      Lanes<Target>::store(d, hn::Add(Lanes<Target>::load(d, to), addend), to);
    }
  }
  accumulate_scalars<Target, Source>(target, source, i, numel);
}

// The most sources that are read side by side: more streams defeat the prefetchers. With more
// sources, partial sums of a block wait in `partial`, which stays in the first-level cache.
constexpr std::size_t kStreams = 8;
constexpr std::size_t kBlock = 2048;

// Adds sources [first, first + count) of elements [begin, end) to `partial`, or begins with them.
template <typename Source>
HWY_INLINE void add_streams(const SumTask& task, std::size_t first, std::size_t count,
                            std::size_t begin, std::size_t end, float* HWY_RESTRICT partial) {
  const hn::ScalableTag<float> d;
  const auto scale = hn::Set(d, task.scale);
  const bool last = first + count == task.sources.size();
  const std::byte* const* const sources = task.sources.data() + first;
  for (std::size_t i = begin; i < end; i += hn::Lanes(d)) {
    const std::size_t offset = i * sizeof(Source);
    auto sum = Lanes<Source>::load(d, sources[0] + offset);
    if (first > 0) sum = hn::Add(hn::Load(d, partial + (i - begin)), sum);
    for (std::size_t k = 1; k < count; ++k)
      sum = hn::Add(sum, Lanes<Source>::load(d, sources[k] + offset));
    if (!last) {
      hn::Store(sum, d, partial + (i - begin));
      continue;
    }
    sum = hn::Mul(sum, scale);
    if (task.accumulate) sum = hn::Add(hn::LoadU(d, task.target + i), sum);
    hn::StoreU(sum, d, task.target + i);
  }
}

template <typename Source>
void sum_range_of(const SumTask& task, std::size_t begin, std::size_t end) {
  if constexpr (kHaveLanes) {
    HWY_ALIGN float partial[kBlock];
    const std::size_t body = end - (end - begin) % hn::Lanes(hn::ScalableTag<float>());
    for (; begin < body; begin += std::min(kBlock, body - begin)) {
      const std::size_t block_end = std::min(body, begin + kBlock);
      for (std::size_t first = 0; first < task.sources.size(); first += kStreams) {
        const std::size_t count = std::min(kStreams, task.sources.size() - first);
        add_streams<Source>(task, first, count, begin, block_end, partial);
      }
    }
  }
  sum_scalars<Source>(task, begin, end);
}

template <typename Source>
void adopt_range_of(float* masters, const std::byte* weights, std::size_t numel) {
  std::size_t i = 0;
  if constexpr (kHaveLanes) {
    const CastLanes<float, Source> d;
    HWY_ALIGN std::byte rounded[sizeof(Source) * hn::MaxLanes(d)];
    for (; i + hn::Lanes(d) <= numel; i += hn::Lanes(d)) {
      const auto master = hn::LoadU(d, masters + i);
      const auto written = Lanes<Source>::load(d, weights + i * sizeof(Source));
      Lanes<Source>::store(d, master, rounded);
      const auto kept = hn::Eq(Lanes<Source>::load(d, rounded), written);
      hn::StoreU(hn::IfThenElse(kept, master, written), d, masters + i);
    }
  }
  adopt_scalars<Source>(masters, weights, i, numel);
}

// From DType values to the loops of two storage types.
void cast_range(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
                std::size_t numel) {
  with_wide_storage(target_dtype, [&](auto to) {
    with_wide_storage(source_dtype, [&](auto from) {
      cast_range_of<decltype(to), decltype(from)>(target, source, numel);
    });
  });
}

void accumulate_range(std::byte* target, DType target_dtype, const std::byte* source,
                      DType source_dtype, std::size_t numel) {
  with_storage(target_dtype, [&](auto to) {
    with_storage(source_dtype, [&](auto from) {
      accumulate_range_of<decltype(to), decltype(from)>(target, source, numel);
    });
  });
}

void sum_range(const SumTask& task, DType dtype, std::size_t begin, std::size_t end) {
  with_storage(dtype, [&](auto from) { sum_range_of<decltype(from)>(task, begin, end); });
}

void adopt_range(float* masters, const std::byte* weights, DType dtype, std::size_t numel) {
  with_wide_storage(dtype,
                    [&](auto from) { adopt_range_of<decltype(from)>(masters, weights, numel); });
}

}  // namespace strata::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace strata::kernels {

HWY_EXPORT(cast_range);
HWY_EXPORT(accumulate_range);
HWY_EXPORT(sum_range);
HWY_EXPORT(adopt_range);

namespace {

// Some hundred KiB a chunk: large beside the cost of handing it out.
constexpr std::int64_t kGrain = 65536;
// A MiB of fp32 is copied in the time that waking a thread takes. Where no more is read, the caller
// is done before other threads begin, which then only take time of their cores.
constexpr std::int64_t kAlone = 4 * kGrain;

template <typename Range>
void split(std::int64_t numel, std::size_t sources, ThreadPool* pool, const Range& range) {
  const bool alone = numel * static_cast<std::int64_t>(sources) <= kAlone;
  for_chunks(alone ? nullptr : pool, numel, kGrain, range);
}

}  // namespace

void cast(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
          Numel numel, ThreadPool* pool) {
  check_cast(target_dtype, source_dtype);
  split(numel.value, 1, pool, [&](std::int64_t begin, std::int64_t end) {
    std::byte* const to = target + bytes_of(Numel(begin), target_dtype).value;
    const std::byte* const from = source + bytes_of(Numel(begin), source_dtype).value;
    const Numel part(end - begin);
    if (target_dtype == source_dtype)
      std::memcpy(to, from, bytes_of(part, target_dtype).size());
    else
      HWY_DYNAMIC_DISPATCH(cast_range)(to, target_dtype, from, source_dtype, part.size());
  });
}

void accumulate(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
                Numel numel, ThreadPool* pool) {
  check_accumulate(target_dtype, source_dtype);
  split(numel.value, 1, pool, [&](std::int64_t begin, std::int64_t end) {
    std::byte* const to = target + bytes_of(Numel(begin), target_dtype).value;
    const std::byte* const from = source + bytes_of(Numel(begin), source_dtype).value;
    HWY_DYNAMIC_DISPATCH(accumulate_range)
    (to, target_dtype, from, source_dtype, static_cast<std::size_t>(end - begin));
  });
}

void sum_in_order(std::span<float> target, std::span<const std::byte* const> sources, DType dtype,
                  float scale, bool accumulate, ThreadPool* pool) {
  check_sum(sources.size(), dtype);
  const SumTask task{target.data(), sources, scale, accumulate};
  const auto numel = static_cast<std::int64_t>(target.size());
  split(numel, sources.size(), pool, [&](std::int64_t begin, std::int64_t end) {
    HWY_DYNAMIC_DISPATCH(sum_range)
    (task, dtype, static_cast<std::size_t>(begin), static_cast<std::size_t>(end));
  });
}

void adopt_written(std::span<float> masters, const std::byte* weights, DType dtype,
                   ThreadPool* pool) {
  check_cast(DType::kFloat32, dtype);
  const auto numel = static_cast<std::int64_t>(masters.size());
  split(numel, 1, pool, [&](std::int64_t begin, std::int64_t end) {
    const std::byte* const from = weights + bytes_of(Numel(begin), dtype).size();
    HWY_DYNAMIC_DISPATCH(adopt_range)
    (masters.data() + begin, from, dtype, static_cast<std::size_t>(end - begin));
  });
}

namespace {

[[noreturn]] void throw_unsupported(const char* operation, const char* types, DType found) {
  throw UsageError("{} is defined for {}; cast other tensors before; found: {}", operation, types,
                   name_of(found));
}

bool is_summable(DType dtype) {
  return is_floating(dtype) && dtype != DType::kFloat64;
}

}  // namespace

void check_cast(DType target, DType source) {
  for (const DType dtype : {target, source}) {
    if (!is_floating(dtype))
      throw_unsupported("A cast", "float64, float32, float16 and bfloat16", dtype);
  }
}

void check_accumulate(DType target, DType source) {
  for (const DType dtype : {target, source}) {
    if (!is_summable(dtype))
      throw_unsupported("Accumulation", "float32, float16 and bfloat16", dtype);
  }
}

void check_sum(std::size_t sources, DType dtype) {
  STRATA_ASSERT(sources > 0);
  if (!is_summable(dtype))
    throw_unsupported("A sum over ranks", "float32, float16 and bfloat16", dtype);
}

}  // namespace strata::kernels
#endif  // HWY_ONCE

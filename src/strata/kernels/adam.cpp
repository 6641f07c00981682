#include "strata/kernels/adam.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/kernels/adam_constants.h"
#include "strata/kernels/elementwise.h"
#include "strata/kernels/elementwise_loops.h"
#include "strata/kernels/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "strata/kernels/adam.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "strata/kernels/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::kernels::HWY_NAMESPACE {

#if STRATA_KERNELS_HAVE_LANES
// Copy16 is the storage of the 16-bit copy, or void.
template <class Copy16>
struct Float32Masters {
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const AdamSpans& spans, std::size_t i) {
    return hn::LoadU(d, spans.weight.data() + i);
  }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> weight, const AdamSpans& spans, std::size_t i) {
    hn::StoreU(weight, d, spans.weight.data() + i);
    if constexpr (!std::is_void_v<Copy16>) Lanes<Copy16>::store(d, weight, spans.weight16 + 2 * i);
  }
};

// Those that follow the 16-bit weights beside them.
template <class Copy16>
struct FollowingMasters : Float32Masters<Copy16> {
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const AdamSpans& spans, std::size_t i) {
    const auto master = hn::LoadU(d, spans.weight.data() + i);
    const auto weight = Lanes<Copy16>::load(d, spans.weight16 + 2 * i);
    std::byte rounded[2 * hn::MaxLanes(d)];
    Lanes<Copy16>::store(d, master, rounded);
    return hn::IfThenElse(hn::Eq(Lanes<Copy16>::load(d, rounded), weight), master, weight);
  }
};

// kernels/master_remainder.h, for 8 or 16 lanes.
struct JoinedMasters {
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const AdamSpans& spans, std::size_t i) {
    const hn::Rebind<std::uint32_t, D> wide;
    const hn::Rebind<std::uint16_t, D> narrow;
    const auto* weights = elements<std::uint16_t>(spans.weight16);
    const auto weight = hn::PromoteTo(wide, hn::LoadU(narrow, weights + i));
    const auto low = hn::PromoteTo(wide, hn::LoadU(narrow, spans.remainder.low + i));
    std::uint8_t bits[8] = {};  // as many as a load may read
    std::memcpy(bits, spans.remainder.halves_up + i / 8, hn::MaxLanes(d) / 8);
    const auto half_up = hn::LoadMaskBits(wide, bits);
    const auto up = hn::Or(half_up, hn::Gt(low, hn::Set(wide, 0x8000U)));
    const auto high = hn::Sub(weight, hn::IfThenElseZero(up, hn::Set(wide, 1U)));
    const auto master = hn::Or(hn::ShiftLeft<16>(high), low);
    const auto zero = hn::Eq(hn::And(weight, hn::Set(wide, 0x7FFFU)), hn::Zero(wide));
    return hn::BitCast(d, hn::IfThenElse(hn::And(up, zero), hn::ShiftLeft<16>(weight), master));
  }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> weight, const AdamSpans& spans, std::size_t i) {
    const hn::Rebind<std::uint32_t, D> wide;
    const hn::Rebind<std::uint16_t, D> narrow;
    Lanes<BFloat16>::store(d, weight, spans.weight16 + 2 * i);
    const auto bits = hn::BitCast(wide, weight);
    hn::StoreU(hn::TruncateTo(narrow, bits), narrow, spans.remainder.low + i);
    // The lowest 17 bits of an exact half above an odd neighbour.
    const auto tail = hn::And(bits, hn::Set(wide, 0x1FFFFU));
    std::uint8_t packed[8];
    hn::StoreMaskBits(wide, hn::Eq(tail, hn::Set(wide, 0x18000U)), packed);
    std::memcpy(spans.remainder.halves_up + i / 8, packed, hn::MaxLanes(d) / 8);
  }
};

// bf16 weights that are rounded at each step.
struct RoundedMasters {
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const AdamSpans& spans, std::size_t i) {
    return Lanes<BFloat16>::load(d, spans.weight16 + 2 * i);
  }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> weight, const AdamSpans& spans, std::size_t i) {
    Lanes<BFloat16>::store(d, weight, spans.weight16 + 2 * i);
  }
};

// Without prefetches: the hardware sees four plain streams, and on huge pages each distance tried
// was slower.
// `Masters` is where the fp32 weights are, and what else of them is written; `Moment` is the
// storage of the moments.
template <bool kL2, class Masters, class Moment = float>
void adam_vectors(const AdamSpans& spans, const AdamConstants& c, std::size_t numel) {
  const hn::ScalableTag<float> d;
  const auto gradient_scale = hn::Set(d, c.gradient_scale);
  const auto decay = hn::Set(d, c.decay);
  const auto l2 = hn::Set(d, c.l2);
  const auto lerp_weight = hn::Set(d, c.lerp_weight);
  const auto from_gradient = hn::Ne(hn::Set(d, c.lerp_from_gradient ? 1.0F : 0.0F), hn::Zero(d));
  const auto beta2 = hn::Set(d, c.beta2);
  const auto square_weight = hn::Set(d, c.square_weight);
  const auto correction2_root = hn::Set(d, c.correction2_root);
  const auto eps = hn::Set(d, c.eps);
  const auto negative_step_size = hn::Set(d, c.negative_step_size);
  constexpr bool kNarrow = !std::is_same_v<Moment, float>;
  std::byte* const HWY_RESTRICT exp_avgs =
      kNarrow ? spans.moments16.exp_avg : std::as_writable_bytes(spans.exp_avg).data();
  std::byte* const HWY_RESTRICT exp_avg_sqs =
      kNarrow ? spans.moments16.exp_avg_sq : std::as_writable_bytes(spans.exp_avg_sq).data();
  const float* const HWY_RESTRICT gradients = spans.gradient.data();
  for (std::size_t i = 0; i < numel; i += hn::Lanes(d)) {
    auto weight = Masters::load(d, spans, i);
    auto gradient = hn::Mul(hn::LoadU(d, gradients + i), gradient_scale);
    if constexpr (kL2) gradient = hn::MulAdd(l2, weight, gradient);
    auto m = Lanes<Moment>::load(d, exp_avgs + sizeof(Moment) * i);
    auto v = Lanes<Moment>::load(d, exp_avg_sqs + sizeof(Moment) * i);
    m = hn::MulAdd(lerp_weight, hn::Sub(gradient, m), hn::IfThenElse(from_gradient, gradient, m));
    v = hn::MulAdd(hn::Mul(square_weight, gradient), gradient, hn::Mul(v, beta2));
    const auto denominator = hn::Add(hn::Div(hn::Sqrt(v), correction2_root), eps);
    const auto update = hn::Div(hn::Mul(negative_step_size, m), denominator);
    weight = hn::Add(hn::Mul(weight, decay), update);
    Lanes<Moment>::store(d, m, exp_avgs + sizeof(Moment) * i);
    Lanes<Moment>::store(d, v, exp_avg_sqs + sizeof(Moment) * i);
    Masters::store(d, weight, spans, i);
  }
}

template <bool kL2>
void adam_body(const AdamSpans& spans, const AdamConstants& constants, std::size_t numel) {
  if (spans.has_remainder())
    adam_vectors<kL2, JoinedMasters>(spans, constants, numel);
  else if (spans.has_moments16())
    adam_vectors<kL2, RoundedMasters, BFloat16>(spans, constants, numel);
  else if (spans.rounds_weight16)
    adam_vectors<kL2, RoundedMasters>(spans, constants, numel);
  else if (spans.weight16 == nullptr)
    adam_vectors<kL2, Float32Masters<void>>(spans, constants, numel);
  else if (spans.follows_weight16 && spans.weight16_dtype == DType::kBFloat16)
    adam_vectors<kL2, FollowingMasters<BFloat16>>(spans, constants, numel);
  else if (spans.follows_weight16)
    adam_vectors<kL2, FollowingMasters<Float16>>(spans, constants, numel);
  else if (spans.weight16_dtype == DType::kBFloat16)
    adam_vectors<kL2, Float32Masters<BFloat16>>(spans, constants, numel);
  else
    adam_vectors<kL2, Float32Masters<Float16>>(spans, constants, numel);
}

// The last few elements go through the scalar loop, whose results are the same bits.
void adam_range(const AdamSpans& spans, const AdamConstants& constants) {
  const std::size_t numel = spans.numel();
  constexpr std::size_t kLanes = hn::MaxLanes(hn::ScalableTag<float>());
  // A thread's vector must not share a byte of remainders with the scalar loop's.
  const bool whole_bytes = !spans.has_remainder() || kLanes % 8 == 0;
  const std::size_t body = whole_bytes ? numel - numel % kLanes : 0;
  if (constants.l2 != 0.0F)
    adam_body<true>(spans, constants, body);
  else
    adam_body<false>(spans, constants, body);
  adam_scalar_loop(part_of(spans, body, numel), constants);
}
#else
void adam_range(const AdamSpans& spans, const AdamConstants& constants) {
  adam_scalar_loop(spans, constants);
}
#endif

}  // namespace strata::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace strata::kernels {

HWY_EXPORT(adam_range);

namespace {

// Widened at once: four arrays of them fit the first two caches.
constexpr std::int64_t kWidened = 4096;

using WidenedPiece = std::array<float, kWidened>;

// Elements of an array as fp32: its own, or copies of them in `room`.
template <typename Byte>
auto in_fp32(Byte* array, DType dtype, Numel numel, WidenedPiece& room) {
  using Float = std::conditional_t<std::is_const_v<Byte>, const float, float>;
  if (dtype == DType::kFloat32) return std::span(reinterpret_cast<Float*>(array), numel.size());
  cast(reinterpret_cast<std::byte*>(room.data()), DType::kFloat32, array, dtype, numel, nullptr);
  return std::span<Float>(room.data(), numel.size());
}

}  // namespace

// 28 bytes an element: large beside the cost of handing out a chunk, small beside a shard. A
// multiple of 8, as remainders want.
constexpr std::int64_t kGrain = 32768;

void adam_step(const AdamSpans& spans, const AdamScalars& scalars, ThreadPool* pool) {
  check_adam(spans, scalars);
  const AdamConstants constants(scalars);
  const auto numel = static_cast<std::int64_t>(spans.numel());
  for_chunks(pool, numel, kGrain, [&](std::int64_t begin, std::int64_t end) {
    const AdamSpans chunk =
        part_of(spans, static_cast<std::size_t>(begin), static_cast<std::size_t>(end));
    if (chunk.gradient16.values == nullptr) {
      HWY_DYNAMIC_DISPATCH(adam_range)(chunk, constants);
      return;
    }
    WidenedPiece wide;  // filled where it is used
    for (std::size_t at = 0; at < chunk.numel(); at += wide.size()) {
      AdamSpans piece = part_of(chunk, at, std::min(at + wide.size(), chunk.numel()));
      const Gradients16 narrow = std::exchange(piece.gradient16, {});
      piece.gradient = in_fp32(narrow.values, narrow.dtype,
                               Numel(static_cast<std::int64_t>(narrow.numel)), wide);
      HWY_DYNAMIC_DISPATCH(adam_range)(piece, constants);
    }
  });
}

namespace {

// The master, unless the weight beside it was written.
float followed_master(const AdamSpans& spans, std::size_t i) {
  float master = spans.weight[i];
  with_storage(spans.weight16_dtype, [&](auto storage) {
    adopt_scalars<decltype(storage)>(&master, spans.weight16 + 2 * i, 0, 1);
  });
  return master;
}

float master_at(const AdamSpans& spans, std::size_t i) {
  if (spans.rounds_weight16) return load_element<BFloat16>(spans.weight16, i);
  if (spans.follows_weight16) return followed_master(spans, i);
  if (!spans.has_remainder()) return spans.weight[i];
  return joined_master(element_at<BFloat16>(spans.weight16, i), remainder_at(spans.remainder, i));
}

struct Moments {
  float first;
  float second;
};

Moments moments_at(const AdamSpans& spans, std::size_t i) {
  if (!spans.has_moments16()) return {spans.exp_avg[i], spans.exp_avg_sq[i]};
  return {load_element<BFloat16>(spans.moments16.exp_avg, i),
          load_element<BFloat16>(spans.moments16.exp_avg_sq, i)};
}

void set_moments(const AdamSpans& spans, std::size_t i, const Moments& moments) {
  if (spans.has_moments16()) {
    store_element<BFloat16>(spans.moments16.exp_avg, i, moments.first);
    store_element<BFloat16>(spans.moments16.exp_avg_sq, i, moments.second);
  } else {
    spans.exp_avg[i] = moments.first;
    spans.exp_avg_sq[i] = moments.second;
  }
}

}  // namespace

void check_adam(const AdamSpans& spans, const AdamScalars& scalars) {
  const std::size_t numel = spans.numel();
  const bool in_weight16 = spans.has_remainder() || spans.rounds_weight16;
  STRATA_ASSERT(!spans.has_remainder() || !spans.rounds_weight16);
  STRATA_ASSERT(!spans.has_moments16() || spans.rounds_weight16);
  STRATA_ASSERT(!spans.follows_weight16 || !in_weight16);
  STRATA_ASSERT(!spans.follows_weight16 || numel == 0 || spans.weight16 != nullptr);
  STRATA_ASSERT(spans.exp_avg.size() == (spans.has_moments16() ? 0 : numel));
  STRATA_ASSERT(spans.exp_avg_sq.size() == (spans.has_moments16() ? 0 : numel));
  STRATA_ASSERT(spans.weight.size() == (in_weight16 ? 0 : numel));
  STRATA_ASSERT(scalars.step >= 1);
  if (in_weight16 && numel > 0 &&
      (spans.weight16 == nullptr || spans.weight16_dtype != DType::kBFloat16)) {
    throw UsageError("Adam finds master weights in bfloat16 weights alone, or with a remainder");
  }
  if (spans.weight16 == nullptr) return;
  if (spans.weight16_dtype != DType::kBFloat16 && spans.weight16_dtype != DType::kFloat16)
    throw UsageError(
        "The copy of the weights that Adam writes is bfloat16 or float16; asked for: {}",
        name_of(spans.weight16_dtype));
}

AdamSpans part_of(const AdamSpans& spans, std::size_t begin, std::size_t end) {
  const std::size_t numel = end - begin;
  AdamSpans part = spans;
  if (spans.has_remainder()) {
    STRATA_ASSERT(begin % 8 == 0);
    part.remainder = spans.remainder.from(begin);
  } else if (!spans.rounds_weight16) {
    part.weight = spans.weight.subspan(begin, numel);
  }
  if (spans.has_moments16()) {
    part.moments16.exp_avg += 2 * begin;
    part.moments16.exp_avg_sq += 2 * begin;
  } else {
    part.exp_avg = spans.exp_avg.subspan(begin, numel);
    part.exp_avg_sq = spans.exp_avg_sq.subspan(begin, numel);
  }
  if (spans.gradient16.values != nullptr)
    part.gradient16 = {spans.gradient16.values + 2 * begin, spans.gradient16.dtype, numel};
  else
    part.gradient = spans.gradient.subspan(begin, numel);
  if (part.weight16 != nullptr) part.weight16 += 2 * begin;
  return part;
}

void adam_scalar_loop(const AdamSpans& spans, const AdamConstants& c) {
  for (std::size_t i = 0; i < spans.gradient.size(); ++i) {
    const float before = master_at(spans, i);
    float gradient = spans.gradient[i] * c.gradient_scale;
    if (c.l2 != 0.0F) gradient = std::fma(c.l2, before, gradient);
    auto [m, v] = moments_at(spans, i);
    m = std::fma(c.lerp_weight, gradient - m, c.lerp_from_gradient ? gradient : m);
    v = std::fma(c.square_weight * gradient, gradient, v * c.beta2);
    const float denominator = std::sqrt(v) / c.correction2_root + c.eps;
    const float weight = before * c.decay + (c.negative_step_size * m) / denominator;
    set_moments(spans, i, {m, v});
    if (spans.has_remainder())
      set_remainder(spans.remainder, i, remainder_of(weight));
    else if (!spans.rounds_weight16)
      spans.weight[i] = weight;
    if (spans.weight16 != nullptr) {
      with_storage(spans.weight16_dtype, [&](auto storage) {
        store_element<decltype(storage)>(spans.weight16, i, weight);
      });
    }
  }
}

namespace {

void require_adam_type(DType dtype, const char* what) {
  if (dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16) return;
  throw UsageError(
      "Adam on the host updates float32, bfloat16 and float16; convert the parameter; found {} of "
      "{}",
      what, name_of(dtype));
}

template <typename Byte>
Byte* from_element(Byte* array, DType dtype, std::int64_t element) {
  return array + size_of(dtype).value * element;
}

// At most kWidened elements, unless all are fp32.
void update_piece(const AdamTensor& tensor, const AdamScalars& scalars, std::int64_t begin,
                  std::int64_t end) {
  WidenedPiece weights;  // filled where they are used
  WidenedPiece first;
  WidenedPiece second;
  WidenedPiece gradients;
  const Numel numel(end - begin);
  const DType moment = tensor.moment_dtype;
  std::byte* const weight = from_element(tensor.weight, tensor.weight_dtype, begin);
  std::byte* const exp_avg = from_element(tensor.exp_avg, moment, begin);
  std::byte* const exp_avg_sq = from_element(tensor.exp_avg_sq, moment, begin);
  AdamSpans spans{.weight = in_fp32(weight, tensor.weight_dtype, numel, weights),
                  .exp_avg = in_fp32(exp_avg, moment, numel, first),
                  .exp_avg_sq = in_fp32(exp_avg_sq, moment, numel, second),
                  .gradient = in_fp32(from_element(tensor.gradient, tensor.gradient_dtype, begin),
                                      tensor.gradient_dtype, numel, gradients)};
  if (tensor.weight_dtype != DType::kFloat32) {
    spans.weight16 = weight;
    spans.weight16_dtype = tensor.weight_dtype;
  }
  adam_step(spans, scalars, nullptr);
  if (moment == DType::kFloat32) return;
  const auto* const new_first = reinterpret_cast<const std::byte*>(first.data());
  const auto* const new_second = reinterpret_cast<const std::byte*>(second.data());
  cast(exp_avg, moment, new_first, DType::kFloat32, numel, nullptr);
  cast(exp_avg_sq, moment, new_second, DType::kFloat32, numel, nullptr);
}

void update_chunk(const AdamTensor& tensor, AdamScalars scalars, std::int64_t begin) {
  scalars.step = tensor.step;
  const std::int64_t end = std::min(begin + kGrain, tensor.numel.value);
  const bool widens = tensor.weight_dtype != DType::kFloat32 ||
                      tensor.moment_dtype != DType::kFloat32 ||
                      tensor.gradient_dtype != DType::kFloat32;
  const std::int64_t piece = widens ? kWidened : kGrain;
  for (std::int64_t i = begin; i < end; i += piece)
    update_piece(tensor, scalars, i, std::min(i + piece, end));
}

}  // namespace

void adam_step(std::span<const AdamTensor> tensors, const AdamScalars& scalars, ThreadPool* pool) {
  STRATA_ASSERT(scalars.late_scale == nullptr);
  std::vector<std::int64_t> ends;  // of each tensor's chunks, all counted through
  std::int64_t chunks = 0;
  for (const AdamTensor& tensor : tensors) {
    require_adam_type(tensor.weight_dtype, "a parameter");
    require_adam_type(tensor.moment_dtype, "a moment");
    require_adam_type(tensor.gradient_dtype, "a gradient");
    STRATA_ASSERT(tensor.step >= 1);
    chunks += (tensor.numel.value + kGrain - 1) / kGrain;
    ends.push_back(chunks);
  }
  for_chunks(pool, chunks, 1, [&](std::int64_t chunk, std::int64_t) {
    const auto i = static_cast<std::size_t>(std::ranges::upper_bound(ends, chunk) - ends.begin());
    const std::int64_t before = i == 0 ? 0 : ends[i - 1];
    update_chunk(tensors[i], scalars, (chunk - before) * kGrain);
  });
}

}  // namespace strata::kernels
#endif  // HWY_ONCE

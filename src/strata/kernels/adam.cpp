#include "strata/kernels/adam.h"

#include <cstring>
#include <type_traits>

#include "strata/base/thread_pool.h"
#include "strata/kernels/adam_constants.h"
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
  if (spans.has_remainder()) {
    adam_vectors<kL2, JoinedMasters>(spans, constants, numel);
  } else if (spans.has_moments16()) {
    adam_vectors<kL2, RoundedMasters, BFloat16>(spans, constants, numel);
  } else if (spans.rounds_weight16) {
    adam_vectors<kL2, RoundedMasters>(spans, constants, numel);
  } else if (spans.weight16 == nullptr) {
    adam_vectors<kL2, Float32Masters<void>>(spans, constants, numel);
  } else if (spans.follows_weight16 && spans.weight16_dtype == DType::kBFloat16) {
    adam_vectors<kL2, FollowingMasters<BFloat16>>(spans, constants, numel);
  } else if (spans.follows_weight16) {
    adam_vectors<kL2, FollowingMasters<Float16>>(spans, constants, numel);
  } else if (spans.weight16_dtype == DType::kBFloat16) {
    adam_vectors<kL2, Float32Masters<BFloat16>>(spans, constants, numel);
  } else {
    adam_vectors<kL2, Float32Masters<Float16>>(spans, constants, numel);
  }
}

// The last few elements go through the scalar loop, whose results are the same bits.
void adam_range(const AdamSpans& spans, const AdamConstants& constants) {
  const std::size_t numel = spans.gradient.size();
  constexpr std::size_t kLanes = hn::MaxLanes(hn::ScalableTag<float>());
  // A thread's vector must not share a byte of remainders with the scalar loop's.
  const bool whole_bytes = !spans.has_remainder() || kLanes % 8 == 0;
  const std::size_t body = whole_bytes ? numel - numel % kLanes : 0;
  if (constants.l2 != 0.0F) {
    adam_body<true>(spans, constants, body);
  } else {
    adam_body<false>(spans, constants, body);
  }
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

// 28 bytes an element: large beside the cost of handing out a chunk, small beside a shard. A
// multiple of 8, as remainders want.
constexpr std::int64_t kGrain = 32768;

void adam_step(const AdamSpans& spans, const AdamScalars& scalars, ThreadPool* pool) {
  check_adam(spans, scalars);
  const AdamConstants constants(scalars);
  if (pool == nullptr) {
    HWY_DYNAMIC_DISPATCH(adam_range)(spans, constants);
    return;
  }
  const auto numel = static_cast<std::int64_t>(spans.gradient.size());
  pool->parallel_for(numel, kGrain, [&](std::int64_t begin, std::int64_t end) {
    HWY_DYNAMIC_DISPATCH(adam_range)
    (part_of(spans, static_cast<std::size_t>(begin), static_cast<std::size_t>(end)), constants);
  });
}

}  // namespace strata::kernels
#endif  // HWY_ONCE

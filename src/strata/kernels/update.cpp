#include "strata/kernels/update.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/kernels/elementwise_loops.h"
#include "strata/kernels/targets.h"
#include "strata/kernels/update_constants.h"
#include "strata/kernels/widened.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "strata/kernels/update.cpp"
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
  static HWY_INLINE hn::Vec<D> load(D d, const UpdateSpans& spans, std::size_t i) {
    return hn::LoadU(d, spans.weight.data() + i);
  }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> weight, const UpdateSpans& spans, std::size_t i) {
    hn::StoreU(weight, d, spans.weight.data() + i);
    if constexpr (!std::is_void_v<Copy16>) Lanes<Copy16>::store(d, weight, spans.weight16 + 2 * i);
  }
};

// Those that follow the 16-bit weights beside them.
template <class Copy16>
struct FollowingMasters : Float32Masters<Copy16> {
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const UpdateSpans& spans, std::size_t i) {
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
  static HWY_INLINE hn::Vec<D> load(D d, const UpdateSpans& spans, std::size_t i) {
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
  static HWY_INLINE void store(D d, hn::Vec<D> weight, const UpdateSpans& spans, std::size_t i) {
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
  static HWY_INLINE hn::Vec<D> load(D d, const UpdateSpans& spans, std::size_t i) {
    return Lanes<BFloat16>::load(d, spans.weight16 + 2 * i);
  }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> weight, const UpdateSpans& spans, std::size_t i) {
    Lanes<BFloat16>::store(d, weight, spans.weight16 + 2 * i);
  }
};

// One vector of an update: changes the states, and returns the new weight.
template <class D, bool kL2>
struct AdamFormula {
  using V = hn::Vec<D>;
  static constexpr bool kHasSecond = true;
  HWY_INLINE AdamFormula(D d, const UpdateConstants& c)
      : decay(hn::Set(d, c.decay)),
        l2(hn::Set(d, c.l2)),
        lerp_weight(hn::Set(d, c.lerp_weight)),
        lerps_from_gradient(hn::Set(d, c.lerp_from_gradient ? 1.0F : 0.0F)),
        beta2(hn::Set(d, c.beta2)),
        rest2(hn::Set(d, c.rest2)),
        correction2_root(hn::Set(d, c.correction2_root)),
        eps(hn::Set(d, c.eps)),
        negative_step_size(hn::Set(d, c.negative_step_size)) {}

  HWY_INLINE V operator()(D d, V weight, V gradient, V& m, V& v) const {
    if constexpr (kL2) gradient = hn::MulAdd(l2, weight, gradient);
    const auto from_gradient = hn::Ne(lerps_from_gradient, hn::Zero(d));
    m = hn::MulAdd(lerp_weight, hn::Sub(gradient, m), hn::IfThenElse(from_gradient, gradient, m));
    v = hn::MulAdd(hn::Mul(rest2, gradient), gradient, hn::Mul(v, beta2));
    const auto denominator = hn::Add(hn::Div(hn::Sqrt(v), correction2_root), eps);
    const auto update = hn::Div(hn::Mul(negative_step_size, m), denominator);
    return hn::Add(hn::Mul(weight, decay), update);
  }
  V decay, l2, lerp_weight, lerps_from_gradient, beta2, rest2, correction2_root, eps,
      negative_step_size;
};

template <class D>
struct LionFormula {
  using V = hn::Vec<D>;
  static constexpr bool kHasSecond = false;
  HWY_INLINE LionFormula(D d, const UpdateConstants& c)
      : decay(hn::Set(d, c.decay)),
        beta1(hn::Set(d, c.beta1)),
        share(hn::Set(d, c.lerp_weight)),
        beta2(hn::Set(d, c.beta2)),
        rest2(hn::Set(d, c.rest2)),
        length(hn::Set(d, c.negative_step_size)) {}

  HWY_INLINE V operator()(D d, V weight, V gradient, V& m, V& /*none*/) const {
    const auto direction = hn::MulAdd(gradient, share, hn::Mul(m, beta1));
    const auto along = hn::Xor(length, hn::And(direction, hn::SignBit(d)));
    const auto update = hn::IfThenElseZero(hn::Gt(hn::Abs(direction), hn::Zero(d)), along);
    m = hn::MulAdd(gradient, rest2, hn::Mul(m, beta2));
    return hn::Add(hn::Mul(weight, decay), update);
  }
  V decay, beta1, share, beta2, rest2, length;
};

// Without prefetches: the hardware sees four plain streams, and on huge pages each distance tried
// was slower.
// `Masters` is where the fp32 weights are, and what else of them is written; `State` is the storage
// of the states.
template <class Formula, class Masters, class State = float>
void update_vectors(const UpdateSpans& spans, const UpdateConstants& c, std::size_t numel) {
  const hn::ScalableTag<float> d;
  const auto gradient_scale = hn::Set(d, c.gradient_scale);
  const Formula formula(d, c);
  constexpr bool kNarrow = !std::is_same_v<State, float>;
  std::byte* const HWY_RESTRICT exp_avgs =
      kNarrow ? spans.moments16.exp_avg : std::as_writable_bytes(spans.exp_avg).data();
  std::byte* const HWY_RESTRICT exp_avg_sqs =
      kNarrow ? spans.moments16.exp_avg_sq : std::as_writable_bytes(spans.exp_avg_sq).data();
  const float* const HWY_RESTRICT gradients = spans.gradient.data();
  for (std::size_t i = 0; i < numel; i += hn::Lanes(d)) {
    const auto weight = Masters::load(d, spans, i);
    const auto gradient = hn::Mul(hn::LoadU(d, gradients + i), gradient_scale);
    auto m = Lanes<State>::load(d, exp_avgs + sizeof(State) * i);
    auto v = hn::Zero(d);
    if constexpr (Formula::kHasSecond) v = Lanes<State>::load(d, exp_avg_sqs + sizeof(State) * i);
    const auto updated = formula(d, weight, gradient, m, v);
    Lanes<State>::store(d, m, exp_avgs + sizeof(State) * i);
    if constexpr (Formula::kHasSecond) Lanes<State>::store(d, v, exp_avg_sqs + sizeof(State) * i);
    Masters::store(d, updated, spans, i);
  }
}

template <class Formula>
void update_body(const UpdateSpans& spans, const UpdateConstants& constants, std::size_t numel) {
  if (spans.has_remainder())
    update_vectors<Formula, JoinedMasters>(spans, constants, numel);
  else if (spans.has_moments16())
    update_vectors<Formula, RoundedMasters, BFloat16>(spans, constants, numel);
  else if (spans.rounds_weight16)
    update_vectors<Formula, RoundedMasters>(spans, constants, numel);
  else if (spans.weight16 == nullptr)
    update_vectors<Formula, Float32Masters<void>>(spans, constants, numel);
  else if (spans.follows_weight16 && spans.weight16_dtype == DType::kBFloat16)
    update_vectors<Formula, FollowingMasters<BFloat16>>(spans, constants, numel);
  else if (spans.follows_weight16)
    update_vectors<Formula, FollowingMasters<Float16>>(spans, constants, numel);
  else if (spans.weight16_dtype == DType::kBFloat16)
    update_vectors<Formula, Float32Masters<BFloat16>>(spans, constants, numel);
  else
    update_vectors<Formula, Float32Masters<Float16>>(spans, constants, numel);
}

// The last few elements go through the scalar loop, whose results are the same bits.
void update_floats(const UpdateSpans& spans, const UpdateConstants& constants, Formula formula) {
  const std::size_t numel = spans.numel();
  using D = hn::ScalableTag<float>;
  constexpr std::size_t kLanes = hn::MaxLanes(D());
  // A thread's vector must not share a byte of remainders with the scalar loop's.
  const bool whole_bytes = !spans.has_remainder() || kLanes % 8 == 0;
  const std::size_t body = whole_bytes ? numel - numel % kLanes : 0;
  if (formula == Formula::kLion)
    update_body<LionFormula<D>>(spans, constants, body);
  else if (constants.l2 != 0.0F)
    update_body<AdamFormula<D, true>>(spans, constants, body);
  else
    update_body<AdamFormula<D, false>>(spans, constants, body);
  update_scalar_loop(part_of(spans, body, numel), constants, formula);
}

// number8() of kernels/states8.h.
template <class D>
HWY_INLINE hn::Vec<D> numbers8(D d, const Map8& map, hn::Vec<D> magnitude) {
  const auto above = [&](std::size_t i) { return hn::Gt(magnitude, hn::Set(d, map.starts[i])); };
  auto slope = hn::Set(d, map.slopes[0]);
  auto offset = hn::Set(d, map.offsets[0]);
  auto last = hn::Set(d, map.lasts[0]);
  for (std::size_t i = 1; i < Map8::kDecades; ++i) {
    const auto here = above(i);
    slope = hn::IfThenElse(here, hn::Set(d, map.slopes[i]), slope);
    offset = hn::IfThenElse(here, hn::Set(d, map.offsets[i]), offset);
    last = hn::IfThenElse(here, hn::Set(d, map.lasts[i]), last);
  }
  const auto number = hn::Min(hn::Trunc(hn::MulAdd(magnitude, slope, offset)), last);
  const auto or_top = hn::IfThenElse(above(Map8::kDecades), hn::Set(d, map.top), number);
  return hn::IfThenElseZero(above(0), or_top);
}

void decode_block(const Map8& map, const Codes8& state, std::span<float> values) {
  const hn::ScalableTag<float> d;
  const hn::Rebind<std::int32_t, decltype(d)> wide;
  const hn::Rebind<std::uint8_t, decltype(d)> narrow;
  const auto scale = hn::Set(d, state.scales[0]);
  std::size_t i = 0;
  for (; i + hn::Lanes(d) <= values.size(); i += hn::Lanes(d)) {
    const auto codes = hn::PromoteTo(wide, hn::LoadU(narrow, state.codes + i));
    hn::StoreU(hn::Mul(hn::GatherIndex(d, map.values.data(), codes), scale), d, values.data() + i);
  }
  for (; i < values.size(); ++i) values[i] = map.values[state.codes[i]] * state.scales[0];
}

void encode_block(const Map8& map, std::span<const float> values, const Codes8& state,
                  bool keeps_positive) {
  const hn::ScalableTag<float> d;
  const hn::Rebind<std::int32_t, decltype(d)> wide;
  const hn::Rebind<std::uint8_t, decltype(d)> narrow;
  auto most = hn::Zero(d);
  std::size_t i = 0;
  for (; i + hn::Lanes(d) <= values.size(); i += hn::Lanes(d))
    most = hn::Max(most, hn::Abs(hn::LoadU(d, values.data() + i)));
  float largest = hn::GetLane(hn::MaxOfLanes(d, most));
  for (; i < values.size(); ++i) largest = std::max(largest, std::fabs(values[i]));
  const Scale8 scale(largest);
  state.scales[0] = scale.scale;
  const auto inverse = hn::Set(d, scale.inverse);
  const auto middle = hn::Set(d, map.zero);
  const auto least = hn::Set(d, keeps_positive ? 1.0F : 0.0F);
  const bool is_signed = map.zero != 0.0F;
  for (i = 0; i + hn::Lanes(d) <= values.size(); i += hn::Lanes(d)) {
    const auto value = hn::LoadU(d, values.data() + i);
    auto number = numbers8(d, map, hn::Mul(hn::Abs(value), inverse));
    number = hn::Max(number, hn::IfThenElseZero(hn::Gt(value, hn::Zero(d)), least));
    if (is_signed) {
      const auto below = hn::Sub(middle, hn::Min(number, middle));
      number = hn::IfThenElse(hn::Lt(value, hn::Zero(d)), below, hn::Add(middle, number));
    }
    hn::StoreU(hn::DemoteTo(narrow, hn::ConvertTo(wide, number)), narrow, state.codes + i);
  }
  for (; i < values.size(); ++i)
    state.codes[i] = code8(map, values[i], scale.inverse, keeps_positive);
}
#else
void update_floats(const UpdateSpans& spans, const UpdateConstants& constants, Formula formula) {
  update_scalar_loop(spans, constants, formula);
}
void decode_block(const Map8& map, const Codes8& state, std::span<float> values) {
  decode8(map, state, values);
}
void encode_block(const Map8& map, std::span<const float> values, const Codes8& state,
                  bool keeps_positive) {
  encode8(map, values, state, keeps_positive);
}
#endif

// Block by block, in the cache.
void update_range(const UpdateSpans& spans, const UpdateConstants& constants, Formula formula,
                  bool keeps_positive) {
  if (!spans.has_states8()) return update_floats(spans, constants, formula);
  std::array<float, kBlock8> first;
  std::array<float, kBlock8> second;
  for (std::size_t begin = 0; begin < spans.numel(); begin += kBlock8) {
    UpdateSpans block = part_of(spans, begin, std::min(begin + kBlock8, spans.numel()));
    const States8 states = std::exchange(block.states8, {});
    block.exp_avg = std::span(first).first(block.numel());
    decode_block(signed_map8(), states.exp_avg, block.exp_avg);
    if (formula == Formula::kAdam) {
      block.exp_avg_sq = std::span(second).first(block.numel());
      decode_block(unsigned_map8(), states.exp_avg_sq, block.exp_avg_sq);
    }
    update_floats(block, constants, formula);
    encode_block(signed_map8(), block.exp_avg, states.exp_avg, false);
    if (formula == Formula::kAdam)
      encode_block(unsigned_map8(), block.exp_avg_sq, states.exp_avg_sq, keeps_positive);
  }
}

}  // namespace strata::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace strata::kernels {

HWY_EXPORT(update_range);

void update_step(const UpdateSpans& spans, const UpdateScalars& scalars, ThreadPool* pool) {
  check_update(spans, scalars);
  const UpdateConstants constants(scalars);
  const auto update = [&](const UpdateSpans& part) {
    HWY_DYNAMIC_DISPATCH(update_range)(part, constants, scalars.formula, scalars.keeps_positive);
  };
  const auto numel = static_cast<std::int64_t>(spans.numel());
  for_chunks(pool, numel, kUpdateGrain, [&](std::int64_t begin, std::int64_t end) {
    const UpdateSpans chunk =
        part_of(spans, static_cast<std::size_t>(begin), static_cast<std::size_t>(end));
    if (chunk.gradient16.values == nullptr) return update(chunk);
    WidenedPiece wide;  // filled where it is used
    for (std::size_t at = 0; at < chunk.numel(); at += wide.size()) {
      UpdateSpans piece = part_of(chunk, at, std::min(at + wide.size(), chunk.numel()));
      const Gradients16 narrow = std::exchange(piece.gradient16, {});
      piece.gradient = in_fp32(narrow.values, narrow.dtype,
                               Numel(static_cast<std::int64_t>(narrow.numel)), wide);
      update(piece);
    }
  });
}

namespace {

// The master, unless the weight beside it was written.
float followed_master(const UpdateSpans& spans, std::size_t i) {
  float master = spans.weight[i];
  with_storage(spans.weight16_dtype, [&](auto storage) {
    adopt_scalars<decltype(storage)>(&master, spans.weight16 + 2 * i, 0, 1);
  });
  return master;
}

float master_at(const UpdateSpans& spans, std::size_t i) {
  if (spans.rounds_weight16) return load_element<BFloat16>(spans.weight16, i);
  if (spans.follows_weight16) return followed_master(spans, i);
  if (!spans.has_remainder()) return spans.weight[i];
  return joined_master(element_at<BFloat16>(spans.weight16, i), remainder_at(spans.remainder, i));
}

struct States {
  float first;
  float second;
};

States states_at(const UpdateSpans& spans, std::size_t i) {
  const auto narrow = [i](const std::byte* values) {
    return values == nullptr ? 0.0F : load_element<BFloat16>(values, i);
  };
  if (spans.has_moments16())
    return {narrow(spans.moments16.exp_avg), narrow(spans.moments16.exp_avg_sq)};
  return {spans.exp_avg[i], spans.exp_avg_sq.empty() ? 0.0F : spans.exp_avg_sq[i]};
}

void set_states(const UpdateSpans& spans, std::size_t i, const States& states) {
  if (spans.has_moments16()) {
    store_element<BFloat16>(spans.moments16.exp_avg, i, states.first);
    if (spans.moments16.exp_avg_sq != nullptr)
      store_element<BFloat16>(spans.moments16.exp_avg_sq, i, states.second);
    return;
  }
  spans.exp_avg[i] = states.first;
  if (!spans.exp_avg_sq.empty()) spans.exp_avg_sq[i] = states.second;
}

// The new weight; changes the states.
float adam_element(const UpdateConstants& c, float before, float gradient, States& states) {
  auto& [m, v] = states;
  if (c.l2 != 0.0F) gradient = std::fma(c.l2, before, gradient);
  m = std::fma(c.lerp_weight, gradient - m, c.lerp_from_gradient ? gradient : m);
  v = std::fma(c.rest2 * gradient, gradient, v * c.beta2);
  const float denominator = std::sqrt(v) / c.correction2_root + c.eps;
  return before * c.decay + (c.negative_step_size * m) / denominator;
}

float lion_element(const UpdateConstants& c, float before, float gradient, States& states) {
  float& m = states.first;
  const float direction = std::fma(gradient, c.lerp_weight, m * c.beta1);
  const float along = std::signbit(direction) ? -c.negative_step_size : c.negative_step_size;
  m = std::fma(gradient, c.rest2, m * c.beta2);
  return before * c.decay + (std::fabs(direction) > 0.0F ? along : 0.0F);
}

}  // namespace

void check_update(const UpdateSpans& spans, const UpdateScalars& scalars) {
  const std::size_t numel = spans.numel();
  const bool in_weight16 = spans.has_remainder() || spans.rounds_weight16;
  STRATA_ASSERT(!spans.has_remainder() || !spans.rounds_weight16);
  STRATA_ASSERT(!spans.has_moments16() || spans.rounds_weight16);
  STRATA_ASSERT(!spans.follows_weight16 || !in_weight16);
  STRATA_ASSERT(!spans.follows_weight16 || numel == 0 || spans.weight16 != nullptr);
  const std::size_t in_fp32 = spans.has_moments16() || spans.has_states8() ? 0 : numel;
  const bool lion = scalars.formula == Formula::kLion;
  STRATA_ASSERT(!spans.has_moments16() || !spans.has_states8());
  STRATA_ASSERT(spans.exp_avg.size() == in_fp32);
  STRATA_ASSERT(spans.exp_avg_sq.size() == (lion ? 0 : in_fp32));
  STRATA_ASSERT(spans.weight.size() == (in_weight16 ? 0 : numel));
  STRATA_ASSERT(scalars.step >= 1);
  if (in_weight16 && numel > 0 &&
      (spans.weight16 == nullptr || spans.weight16_dtype != DType::kBFloat16)) {
    throw UsageError(
        "the update finds master weights in bfloat16 weights alone, or with a remainder");
  }
  if (spans.weight16 == nullptr) return;
  if (spans.weight16_dtype != DType::kBFloat16 && spans.weight16_dtype != DType::kFloat16)
    throw UsageError(
        "The copy of the weights that the update writes is bfloat16 or float16; asked for: {}",
        name_of(spans.weight16_dtype));
}

UpdateSpans part_of(const UpdateSpans& spans, std::size_t begin, std::size_t end) {
  const std::size_t numel = end - begin;
  UpdateSpans part = spans;
  if (spans.has_remainder()) {
    STRATA_ASSERT(begin % 8 == 0);
    part.remainder = spans.remainder.from(begin);
  } else if (!spans.rounds_weight16) {
    part.weight = spans.weight.subspan(begin, numel);
  }
  const bool second = !spans.exp_avg_sq.empty() || spans.moments16.exp_avg_sq != nullptr ||
                      spans.states8.exp_avg_sq.codes != nullptr;
  if (spans.has_states8()) {
    STRATA_ASSERT(begin % kBlock8 == 0);
    part.states8.exp_avg = spans.states8.exp_avg.from(begin);
    if (second) part.states8.exp_avg_sq = spans.states8.exp_avg_sq.from(begin);
  } else if (spans.has_moments16()) {
    part.moments16.exp_avg += 2 * begin;
    if (second) part.moments16.exp_avg_sq += 2 * begin;
  } else {
    part.exp_avg = spans.exp_avg.subspan(begin, numel);
    if (second) part.exp_avg_sq = spans.exp_avg_sq.subspan(begin, numel);
  }
  if (spans.gradient16.values != nullptr)
    part.gradient16 = {spans.gradient16.values + 2 * begin, spans.gradient16.dtype, numel};
  else
    part.gradient = spans.gradient.subspan(begin, numel);
  if (part.weight16 != nullptr) part.weight16 += 2 * begin;
  return part;
}

void update_scalar_loop(const UpdateSpans& spans, const UpdateConstants& c, Formula formula) {
  for (std::size_t i = 0; i < spans.gradient.size(); ++i) {
    const float before = master_at(spans, i);
    const float gradient = spans.gradient[i] * c.gradient_scale;
    States states = states_at(spans, i);
    const float weight = formula == Formula::kLion ? lion_element(c, before, gradient, states)
                                                   : adam_element(c, before, gradient, states);
    set_states(spans, i, states);
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

}  // namespace strata::kernels
#endif  // HWY_ONCE

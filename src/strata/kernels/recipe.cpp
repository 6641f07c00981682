#include "strata/kernels/recipe.h"

#include <algorithm>

#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/kernels/elementwise.h"
#include "strata/kernels/recipe_scalars.h"
#include "strata/kernels/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "strata/kernels/recipe.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "strata/kernels/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::kernels::HWY_NAMESPACE {

// Applies a step to elements [first, last); `first` begins a block of random words. Returns the
// number of elements done. Only the lower half of the block's number changes.
#if STRATA_KERNELS_HAVE_LANES
using Floats = hn::ScalableTag<float>;
using Words = hn::Rebind<std::uint32_t, Floats>;
using Ints = hn::Rebind<std::int32_t, Floats>;
using Float = hn::Vec<Floats>;
using Word = hn::Vec<Words>;

template <std::size_t kCount>
HWY_INLINE Float polynomial_of(const float (&terms)[kCount], Float x) {
  const Floats d;
  Float sum = hn::Set(d, terms[0]);
  for (std::size_t i = 1; i < kCount; ++i) sum = hn::MulAdd(sum, x, hn::Set(d, terms[i]));
  return sum;
}

HWY_INLINE Float log_of(Float x) {
  const Floats d;
  const Ints di;
  const auto bits = hn::BitCast(di, x);
  const auto exponent = hn::ShiftRight<23>(hn::Sub(bits, hn::Set(di, kRootOfHalf)));
  const Float m =
      hn::Sub(hn::BitCast(d, hn::Sub(bits, hn::ShiftLeft<23>(exponent))), hn::Set(d, 1.0F));
  const Float e = hn::ConvertTo(d, exponent);
  const Float z = hn::Mul(m, m);
  Float y = hn::Mul(hn::Mul(polynomial_of(kLogTerms, m), m), z);
  y = hn::MulAdd(e, hn::Set(d, kLn2Low), y);
  y = hn::MulAdd(z, hn::Set(d, -0.5F), y);
  return hn::MulAdd(e, hn::Set(d, kLn2High), hn::Add(m, y));
}

HWY_INLINE Float erfinv_of(Float x) {
  const Floats d;
  const Float one = hn::Set(d, 1.0F);
  const Float size = hn::Abs(x);
  const auto inside = hn::Lt(size, one);
  const Float w = hn::Neg(log_of(hn::NegMulAdd(x, x, one)));
  const Float centre = polynomial_of(kErfinvCentre, hn::Sub(w, hn::Set(d, 2.5F)));
  const Float tail = polynomial_of(kErfinvTail, hn::Sub(hn::Sqrt(w), hn::Set(d, 3.0F)));
  const Float value = hn::Mul(hn::IfThenElse(hn::Lt(w, hn::Set(d, 5.0F)), centre, tail), x);
  const Float end = hn::CopySign(hn::Set(d, std::numeric_limits<float>::infinity()), x);
  const Float nan = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
  return hn::IfThenElse(inside, value, hn::IfThenElse(hn::Eq(size, one), end, nan));
}

struct WordBlocks {
  Word words[kWords];  // word i of a block in each lane
};

HWY_INLINE void multiply(Word x, Word factor, Word& high, Word& low) {
  const Words d;
  const hn::Repartition<std::uint64_t, Words> wide;
  const auto even = hn::MulEven(x, factor);
  const auto odd = hn::MulEven(hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(wide, x))), factor);
  high = hn::OddEven(hn::BitCast(d, odd), hn::BitCast(d, hn::ShiftRight<32>(even)));
  low = hn::OddEven(hn::BitCast(d, hn::ShiftLeft<32>(odd)), hn::BitCast(d, even));
}

// The random words of the blocks from `number` on, one block a lane.
HWY_INLINE WordBlocks blocks_from(std::uint64_t number, std::uint64_t key) {
  const Words d;
  Word c0 = hn::Iota(d, static_cast<std::uint32_t>(number));
  Word c1 = hn::Set(d, static_cast<std::uint32_t>(number >> 32U));
  Word c2 = hn::Zero(d);
  Word c3 = hn::Zero(d);
  const Word first_factor = hn::Set(d, kPhiloxFirst);
  const Word second_factor = hn::Set(d, kPhiloxSecond);
  auto first_key = static_cast<std::uint32_t>(key);
  auto second_key = static_cast<std::uint32_t>(key >> 32U);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    Word first_high;
    Word first_low;
    Word second_high;
    Word second_low;
    multiply(c0, first_factor, first_high, first_low);
    multiply(c2, second_factor, second_high, second_low);
    c0 = hn::Xor(hn::Xor(second_high, c1), hn::Set(d, first_key));
    c1 = second_low;
    c2 = hn::Xor(hn::Xor(first_high, c3), hn::Set(d, second_key));
    c3 = first_low;
    first_key += kPhiloxKeyFirst;
    second_key += kPhiloxKeySecond;
  }
  return {{c0, c1, c2, c3}};
}

HWY_INLINE Float uniform_lanes(Word word, Float a, Float b) {
  const Floats d;
  const Ints di;
  const Float u =
      hn::Mul(hn::ConvertTo(d, hn::BitCast(di, hn::ShiftRight<8>(word))), hn::Set(d, 0x1p-24F));
  const Float value = hn::MulAdd(u, hn::Sub(b, a), a);
  return hn::IfThenElse(hn::Lt(value, b), value, a);
}

HWY_INLINE void normal_lanes(Word first, Word second, Float& along, Float& across) {
  const Floats d;
  const Words dw;
  const Ints di;
  const Float u = hn::MulAdd(hn::ConvertTo(d, hn::BitCast(di, hn::ShiftRight<1>(first))),
                             hn::Set(d, 0x1p-31F), hn::Set(d, 0x1p-32F));
  const Float radius = hn::Sqrt(hn::Mul(hn::Set(d, -2.0F), log_of(u)));
  const Word quarter = hn::ShiftRight<30>(second);
  const Word low = hn::And(hn::ShiftRight<6>(second), hn::Set(dw, 0xFFFFFFU));
  const Float part = hn::ConvertTo(d, hn::BitCast(di, low));
  const Float turn =
      hn::Add(hn::MulAdd(part, hn::Set(d, 0x1p-24F), hn::Set(d, -0.5F)), hn::Set(d, 0x1p-25F));
  const Float angle = hn::Mul(turn, hn::Set(d, kHalfPi));
  const Float z = hn::Mul(angle, angle);
  const Float sine = hn::MulAdd(hn::Mul(polynomial_of(kSinTerms, z), z), angle, angle);
  const Float cosine = hn::MulAdd(hn::Mul(polynomial_of(kCosTerms, z), z), z,
                                  hn::MulAdd(z, hn::Set(d, -0.5F), hn::Set(d, 1.0F)));
  const auto swapped = hn::RebindMask(d, hn::TestBit(quarter, hn::Set(dw, 1U)));
  // Quarters 1 and 2 turn the one around, 2 and 3 the other.
  const Word upper = hn::And(quarter, hn::Set(dw, 2U));
  const Word turned = hn::Xor(upper, hn::ShiftLeft<1>(hn::And(quarter, hn::Set(dw, 1U))));
  const Float c = hn::IfThenElse(swapped, sine, cosine);
  const Float s = hn::IfThenElse(swapped, cosine, sine);
  along = hn::Mul(radius, hn::BitCast(d, hn::Xor(hn::BitCast(dw, c), hn::ShiftLeft<30>(turned))));
  across = hn::Mul(radius, hn::BitCast(d, hn::Xor(hn::BitCast(dw, s), hn::ShiftLeft<30>(upper))));
}

HWY_INLINE std::int64_t random_vectors(const RecipeStep& step, std::int64_t first,
                                       std::int64_t last, float* values) {
  const Floats d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const Float a = hn::Set(d, step.a);
  const Float b = hn::Set(d, step.b);
  std::int64_t i = first;
  for (; i + kWords * lanes <= last; i += kWords * lanes) {
    const WordBlocks blocks = blocks_from(static_cast<std::uint64_t>(i / kWords), step.key);
    Float out[kWords];
    if (step.op == RecipeOp::kUniform) {
      for (std::size_t k = 0; k < kWords; ++k) out[k] = uniform_lanes(blocks.words[k], a, b);
    } else {
      normal_lanes(blocks.words[0], blocks.words[1], out[0], out[1]);
      normal_lanes(blocks.words[2], blocks.words[3], out[2], out[3]);
      for (Float& value : out) value = hn::MulAdd(value, b, a);
    }
    hn::StoreInterleaved4(out[0], out[1], out[2], out[3], d, values + (i - first));
  }
  return i - first;
}

template <typename Function>
HWY_INLINE std::int64_t each_vector(std::int64_t count, float* values, const Function& function) {
  const Floats d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes)
    hn::StoreU(function(hn::LoadU(d, values + i)), d, values + i);
  return i;
}

std::int64_t apply_vectors(const RecipeStep& step, std::int64_t first, std::int64_t last,
                           float* values) {
  const Floats d;
  const Float a = hn::Set(d, step.a);
  const Float b = hn::Set(d, step.b);
  const std::int64_t count = last - first;
  switch (step.op) {
    case RecipeOp::kUniform:
    case RecipeOp::kNormal:
      return random_vectors(step, first, last, values);
    case RecipeOp::kAdd:
      return each_vector(count, values, [&](Float x) HWY_ATTR { return hn::Add(x, a); });
    case RecipeOp::kMultiply:
      return each_vector(count, values, [&](Float x) HWY_ATTR { return hn::Mul(x, a); });
    case RecipeOp::kDivide:
      return each_vector(count, values, [&](Float x) HWY_ATTR { return hn::Div(x, a); });
    case RecipeOp::kErfinv:
      return each_vector(count, values, [&](Float x) HWY_ATTR { return erfinv_of(x); });
    case RecipeOp::kFill:
      return each_vector(count, values, [&](Float) HWY_ATTR { return a; });
    case RecipeOp::kClamp:
      break;  // NaNs are the scalar loop's; compilers make vectors of it
  }
  return 0;
}
#else
std::int64_t apply_vectors(const RecipeStep&, std::int64_t, std::int64_t, float*) {
  return 0;
}
#endif

}  // namespace strata::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace strata::kernels {

HWY_EXPORT(apply_vectors);

namespace {

void check_replay(DType dtype) {
  if (dtype != DType::kFloat32 && dtype != DType::kBFloat16 && dtype != DType::kFloat16)
    throw UsageError(
        "values are replayed in float32, bfloat16 and float16; make others real; found: {}",
        name_of(dtype));
}

constexpr std::int64_t kBlock = 4096;  // elements that go through all steps in the first cache
constexpr std::int64_t kReplayGrain = 16 * kBlock;  // of a thread

void apply(const RecipeStep& step, std::int64_t first, std::int64_t last, float* values) {
  const std::int64_t head = std::min(last, (first + kWords - 1) / kWords * kWords);
  apply_scalars(step, first, head, values);
  const std::int64_t done =
      HWY_DYNAMIC_DISPATCH(apply_vectors)(step, head, last, values + (head - first));
  apply_scalars(step, head + done, last, values + (head + done - first));
}

// Blocks begin at multiples of kBlock, so that no block of random words lies in two.
void replay_range(std::span<const RecipeStep> recipe, std::int64_t begin, std::int64_t end,
                  std::byte* target, DType dtype) {
  alignas(64) float values[kBlock];
  for (std::int64_t at = begin; at < end;) {
    const std::int64_t stop = std::min(end, (at / kBlock + 1) * kBlock);
    std::fill_n(values, stop - at, 0.0F);
    for (const RecipeStep& step : recipe) {
      for_each_run(step.region, at, stop, [&](std::int64_t first, std::int64_t last) {
        apply(step, first, last, values + (first - at));
      });
    }
    cast(target + bytes_of(Numel(at - begin), dtype).size(), dtype,
         reinterpret_cast<const std::byte*>(values), DType::kFloat32, Numel(stop - at), nullptr);
    at = stop;
  }
}

}  // namespace

void replay(std::span<const RecipeStep> recipe, Numel begin, Numel numel, std::byte* target,
            DType dtype, ThreadPool* pool) {
  check_replay(dtype);
  for_chunks(pool, numel.value, kReplayGrain, [&](std::int64_t first, std::int64_t last) {
    replay_range(recipe, begin.value + first, begin.value + last,
                 target + bytes_of(Numel(first), dtype).size(), dtype);
  });
}

}  // namespace strata::kernels
#endif  // HWY_ONCE

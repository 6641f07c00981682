// Loads and stores of the storage types as fp32 lanes, for the files that Highway compiles once for
// each instruction set; included by them after hwy/foreach_target.h, by nothing else.
//
// STRATA_KERNELS_HAVE_LANES says whether the target at hand has fused multiply-add and conversions
// that round as float16.h does (AVX2 with F16C and better, NEON). Where it is 0 the kernels run
// their scalar references, so that every machine gives the same bits; such machines are older than
// 2013.

#if defined(STRATA_KERNELS_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef STRATA_KERNELS_LANES_INL_H_
#undef STRATA_KERNELS_LANES_INL_H_
#else
#define STRATA_KERNELS_LANES_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

#include "strata/kernels/float16.h"

#undef STRATA_KERNELS_HAVE_LANES
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2) || (HWY_ARCH_ARM_A64 && HWY_TARGET == HWY_NEON)
#define STRATA_KERNELS_HAVE_LANES 1
#else
#define STRATA_KERNELS_HAVE_LANES 0
#endif

HWY_BEFORE_NAMESPACE();
namespace strata::kernels::HWY_NAMESPACE {

// For templates, of which a target without lanes compiles nothing else.
constexpr bool kHaveLanes = STRATA_KERNELS_HAVE_LANES != 0;

namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
HWY_INLINE T* elements(std::byte* address) {
  return static_cast<T*>(static_cast<void*>(address));
}

template <typename T>
HWY_INLINE const T* elements(const std::byte* address) {
  return static_cast<const T*>(static_cast<const void*>(address));
}

// One load or store is Lanes(d) elements, d being fp32 lanes. `Storage`: the type in memory.
template <typename Storage>
struct Lanes;

template <>
struct Lanes<float> {
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const std::byte* from) {
    return hn::LoadU(d, elements<float>(from));
  }
  template <class D>
  static HWY_INLINE void store(D d, hn::Vec<D> value, std::byte* to) {
    hn::StoreU(value, d, elements<float>(to));
  }
};

// For d of at most half a vector.
template <>
struct Lanes<double> {
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const std::byte* from) {
    return hn::DemoteTo(d, hn::LoadU(hn::Rebind<double, D>(), elements<double>(from)));
  }
  template <class D>
  static HWY_INLINE void store(D, hn::Vec<D> value, std::byte* to) {
    const hn::Rebind<double, D> wide;
    hn::StoreU(hn::PromoteTo(wide, value), wide, elements<double>(to));
  }
};

// In integer arithmetic: the conversion instructions of some targets flush subnormals.
template <>
struct Lanes<BFloat16> {
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const std::byte* from) {
    const hn::Rebind<std::uint32_t, D> wide;
    const hn::Rebind<std::uint16_t, D> narrow;
    const auto bits = hn::PromoteTo(wide, hn::LoadU(narrow, elements<std::uint16_t>(from)));
    return hn::BitCast(d, hn::ShiftLeft<16>(bits));
  }
  template <class D>
  static HWY_INLINE void store(D, hn::Vec<D> value, std::byte* to) {
    const hn::Rebind<std::uint32_t, D> wide;
    const hn::Rebind<std::uint16_t, D> narrow;
    const auto bits = hn::BitCast(wide, value);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(wide, 1U));
    const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(wide, 0x7FFFU)));
    const auto quiet = hn::Or(bits, hn::Set(wide, 0x00400000U));
    const auto nan = hn::RebindMask(wide, hn::IsNaN(value));
    const auto high = hn::ShiftRight<16>(hn::IfThenElse(nan, quiet, rounded));
    hn::StoreU(hn::TruncateTo(narrow, high), narrow, elements<std::uint16_t>(to));
  }
};

template <>
struct Lanes<Float16> {
  template <class D>
  static HWY_INLINE hn::Vec<D> load(D d, const std::byte* from) {
    const hn::Rebind<hwy::float16_t, D> narrow;
    return hn::PromoteTo(d, hn::LoadU(narrow, elements<hwy::float16_t>(from)));
  }
  template <class D>
  static HWY_INLINE void store(D, hn::Vec<D> value, std::byte* to) {
    const hn::Rebind<hwy::float16_t, D> narrow;
    hn::StoreU(hn::DemoteTo(narrow, value), narrow, elements<hwy::float16_t>(to));
  }
};

}  // namespace strata::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle

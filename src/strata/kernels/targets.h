// Which instruction sets the kernels are compiled for; included before any header of Highway. Below
// AVX2 the kernels run their scalar references (see lanes-inl.h), so of those targets the baseline
// is enough; vectors whose length the compiler does not know (SVE) cannot be kept in arrays.
#pragma once

#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)

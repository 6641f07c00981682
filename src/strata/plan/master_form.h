// The form in which the fp32 master weights of a unit's shard are kept. Pure arithmetic.
#pragma once

#include "strata/base/dtype.h"
#include "strata/base/units.h"
#include "strata/plan/unit_plan.h"

namespace strata::plan {

enum class MasterForm {
  kNone,       // frozen: never updated
  kShard,      // the weights are fp32 and their own masters
  kFloat32,    // fp32 beside the weights
  kRemainder,  // the bits that bf16 weights lack: kernels/master_remainder.h
  kRounded,    // none: bf16 weights are updated in fp32 and rounded at each step
};

// The values that the optimizer updates if weights are bf16.
enum class Masters { kFloat32, kRemainder, kRounded };

inline MasterForm master_form(const UnitSpec& unit, Masters of_bf16) {
  if (!unit.trainable) return MasterForm::kNone;
  if (unit.dtype == DType::kFloat32) return MasterForm::kShard;
  if (unit.dtype != DType::kBFloat16 || of_bf16 == Masters::kFloat32) return MasterForm::kFloat32;
  return of_bf16 == Masters::kRemainder ? MasterForm::kRemainder : MasterForm::kRounded;
}

// The bytes that masters of this form take beside the weights, for a shard of `numel`.
inline Bytes master_bytes(MasterForm form, Numel numel) {
  switch (form) {
    case MasterForm::kNone:
    case MasterForm::kShard:
    case MasterForm::kRounded:
      return Bytes();
    case MasterForm::kFloat32:
      return bytes_of(numel, DType::kFloat32);
    case MasterForm::kRemainder:
      return align_up(Bytes(2 * numel.value), 64_B) + align_up(Bytes((numel.value + 7) / 8), 64_B);
  }
  return Bytes();
}

}  // namespace strata::plan

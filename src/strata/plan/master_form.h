// How the fp32 master weights of a unit's shard are kept. Pure arithmetic.
#pragma once

#include "strata/base/dtype.h"
#include "strata/base/units.h"
#include "strata/plan/unit_plan.h"

namespace strata::plan {

enum class MasterForm {
  kNone,       // frozen: nobody updates it
  kShard,      // the weights are fp32 and their own masters
  kFloat32,    // fp32 beside the weights
  kRemainder,  // what bf16 weights lack of them: kernels/master_remainder.h
};

// `remainders`: the optimizer works on weights and remainders where it can.
inline MasterForm master_form(const UnitSpec& unit, bool remainders) {
  if (!unit.trainable) return MasterForm::kNone;
  if (unit.dtype == DType::kFloat32) return MasterForm::kShard;
  return remainders && unit.dtype == DType::kBFloat16 ? MasterForm::kRemainder
                                                      : MasterForm::kFloat32;
}

// What it takes beside the weights, for a shard of `numel`.
inline Bytes master_bytes(MasterForm form, Numel numel) {
  switch (form) {
    case MasterForm::kNone:
    case MasterForm::kShard:
      return Bytes();
    case MasterForm::kFloat32:
      return bytes_of(numel, DType::kFloat32);
    case MasterForm::kRemainder:
      return align_up(Bytes(2 * numel.value + (numel.value + 7) / 8), 64_B);
  }
  return Bytes();
}

}  // namespace strata::plan

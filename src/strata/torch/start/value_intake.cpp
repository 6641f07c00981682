#include "strata/torch/start/value_intake.h"

#include "strata/base/error.h"
#include "strata/torch/base/dtype.h"
#include "strata/torch/base/placement.h"

namespace strata::torch {

void ValueIntake::store(int param, Numel begin, const at::Tensor& values) {
  STRATA_ASSERT(values.is_contiguous() && values.device() == place_);
  engine_.weights().enqueue_store_everywhere(param, begin, Numel(values.numel()),
                                             static_cast<const std::byte*>(values.const_data_ptr()),
                                             from_scalar_type(values.scalar_type()));
}

at::Tensor ValueIntake::piece_like(const at::Tensor& values) {
  if (piece_ == nullptr) piece_ = engine_.device().allocate(kPiece, memory::Kind::kStaging);
  STRATA_ASSERT(values.nbytes() <= piece_->bytes().size());
  return tensor_over(piece_->bytes().data(), values.numel(), values.scalar_type(), place_);
}

void ValueIntake::store_from_rank_0(int param, Numel begin, const at::Tensor& values) {
  at::Tensor piece = piece_like(values);
  if (engine_.collectives().rank() == 0) piece.copy_(values.detach().view({-1}));
  engine_.collectives().broadcast(
      {static_cast<std::byte*>(piece.mutable_data_ptr()), piece.nbytes()}, 0);
  store(param, begin, piece);
}

}  // namespace strata::torch

#include "strata/torch/value_intake.h"

#include "strata/base/error.h"
#include "strata/torch/dtype.h"
#include "strata/torch/placement.h"

namespace strata::torch {
namespace {

const std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

}  // namespace

void ValueIntake::store(int param, Numel begin, const at::Tensor& values) {
  STRATA_ASSERT(values.is_contiguous());
  const at::Tensor near =
      values.device() == place_ || values.device().is_cpu() ? values : values.cpu();
  engine::Weights& weights = engine_.weights();
  const DType dtype = from_scalar_type(near.scalar_type());
  const Numel numel(near.numel());
  if (near.device() == place_) {
    weights.enqueue_store(param, begin, numel, data_of(near), dtype);
  } else {
    weights.store(param, begin, numel, data_of(near), dtype);
  }
}

void ValueIntake::store_from_rank_0(int param, Numel begin, const at::Tensor& values) {
  if (piece_ == nullptr) {
    piece_ = engine_.device().allocate(kIntakePiece, memory::Kind::kStaging);
  }
  STRATA_ASSERT(values.nbytes() <= piece_->bytes().size());
  const std::span<std::byte> bytes = piece_->bytes().first(values.nbytes());
  const at::Tensor piece = tensor_over(bytes.data(), values.numel(), values.scalar_type(), place_);
  if (engine_.collectives().rank() == 0) piece.copy_(values.detach().view({-1}));
  engine_.collectives().broadcast(bytes, 0);
  store(param, begin, piece);
}

}  // namespace strata::torch

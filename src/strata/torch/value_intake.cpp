#include "strata/torch/value_intake.h"

#include <algorithm>

#include "strata/base/error.h"
#include "strata/torch/dtype.h"
#include "strata/torch/placement.h"

namespace strata::torch {
namespace {

const std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

}  // namespace

at::Tensor ValueIntake::piece_like(const at::Tensor& values) {
  if (piece_ == nullptr) {
    piece_ = engine_.device().allocate(kIntakePiece, memory::Kind::kStaging);
  }
  STRATA_ASSERT(values.nbytes() <= piece_->bytes().size());
  return tensor_over(piece_->bytes().data(), values.numel(), values.scalar_type(), place_);
}

void ValueIntake::copy_in(int param, Numel begin, const at::Tensor& values) {
  engine_.weights().store(param, begin, Numel(values.numel()), data_of(values),
                          from_scalar_type(values.scalar_type()));
}

void ValueIntake::store(int param, Numel begin, const at::Tensor& values) {
  STRATA_ASSERT(values.is_contiguous());
  if (values.device() == place_) {
    copy_in(param, begin, values);
    return;
  }
  const at::Tensor flat = values.detach().view({-1});
  const auto [first, last] = engine_.weights().owned_range(param);
  const Numel end = std::min(begin + Numel(flat.numel()), last);
  const Numel most(kIntakePiece / Bytes(static_cast<std::int64_t>(flat.element_size())));
  for (Numel at = std::max(begin, first); at < end; at += most) {
    const at::Tensor source = flat.narrow(0, (at - begin).value, std::min(most, end - at).value);
    at::Tensor piece = piece_like(source);
    piece.copy_(source);
    copy_in(param, at, piece);
  }
}

void ValueIntake::store_from_rank_0(int param, Numel begin, const at::Tensor& values) {
  at::Tensor piece = piece_like(values);
  if (engine_.collectives().rank() == 0) piece.copy_(values.detach().view({-1}));
  engine_.collectives().broadcast(
      {static_cast<std::byte*>(piece.mutable_data_ptr()), piece.nbytes()}, 0);
  copy_in(param, begin, piece);
}

}  // namespace strata::torch

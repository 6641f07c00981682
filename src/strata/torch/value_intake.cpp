#include "strata/torch/value_intake.h"

#include <algorithm>
#include <cstring>

#include "strata/base/error.h"
#include "strata/torch/dtype.h"
#include "strata/torch/placement.h"

namespace strata::torch {
namespace {

constexpr std::int64_t kCopyGrain = 1 << 20;  // bytes that a thread copies at least

const std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

void copy_in_parallel(ThreadPool& threads, std::byte* target, const std::byte* source,
                      std::size_t bytes) {
  threads.parallel_for(
      static_cast<std::int64_t>(bytes), kCopyGrain, [&](std::int64_t begin, std::int64_t end) {
        std::memcpy(target + begin, source + begin, static_cast<std::size_t>(end - begin));
      });
}

}  // namespace

ValueIntake::~ValueIntake() {
  for (Buffer& buffer : buffers_) {
    try {
      if (buffer.taken) buffer.taken->wait();
    } catch (const Error&) {
      continue;  // the device has failed; whoever waits for its work is told
    }
  }
}

void ValueIntake::store(int param, Numel begin, const at::Tensor& values) {
  STRATA_ASSERT(values.is_contiguous());
  if (values.device() == place_) {
    store_from_device(param, begin, values);
  } else {
    store_from_host(param, begin, values);
  }
}

void ValueIntake::store_from_device(int param, Numel begin, const at::Tensor& values) {
  engine_.weights().enqueue_store_everywhere(param, begin, Numel(values.numel()), data_of(values),
                                             from_scalar_type(values.scalar_type()));
}

void ValueIntake::store_from_host(int param, Numel begin, const at::Tensor& values) {
  engine::Weights& weights = engine_.weights();
  complete_ =
      complete_ && !(weights.unit_of(param).whole && engine_.collectives().world_size() > 1);
  const DType dtype = from_scalar_type(values.scalar_type());
  const auto [first, last] = weights.owned_range(param);
  const Numel end = std::min(begin + Numel(values.numel()), last);
  const Numel most(kIntakePiece / size_of(dtype));
  for (Numel at = std::max(begin, first); at < end; at += most) {
    const Numel count = std::min(most, end - at);
    const std::size_t bytes = bytes_of(count, dtype).size();
    const std::span<std::byte> buffer = next_buffer();
    copy_in_parallel(threads_, buffer.data(), data_of(values) + bytes_of(at - begin, dtype).size(),
                     bytes);
    weights.enqueue_store(param, at, count, buffer.data(), dtype);
    buffers_[turn_ % buffers_.size()].taken = engine_.device().compute_stream().record();
  }
}

std::span<std::byte> ValueIntake::next_buffer() {
  Buffer& buffer = buffers_[++turn_ % buffers_.size()];
  if (buffer.memory == nullptr) {
    buffer.memory = engine_.device().allocate_host(kIntakePiece, memory::Kind::kStaging);
  }
  if (buffer.taken) buffer.taken->wait();
  buffer.taken.reset();
  return buffer.memory->bytes();
}

at::Tensor ValueIntake::piece_like(const at::Tensor& values) {
  if (piece_ == nullptr) {
    piece_ = engine_.device().allocate(kIntakePiece, memory::Kind::kStaging);
  }
  STRATA_ASSERT(values.nbytes() <= piece_->bytes().size());
  return tensor_over(piece_->bytes().data(), values.numel(), values.scalar_type(), place_);
}

void ValueIntake::store_from_rank_0(int param, Numel begin, const at::Tensor& values) {
  at::Tensor piece = piece_like(values);
  if (engine_.collectives().rank() == 0) piece.copy_(values.detach().view({-1}));
  engine_.collectives().broadcast(
      {static_cast<std::byte*>(piece.mutable_data_ptr()), piece.nbytes()}, 0);
  store_from_device(param, begin, piece);
}

}  // namespace strata::torch

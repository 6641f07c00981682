#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include "strata/torch/base/placement.h"
#include "strata/torch/start/model_start.h"

namespace strata::torch {
namespace {

constexpr std::int64_t kTokens = 32;
constexpr std::int64_t kWidth = 256;
constexpr std::int64_t kHeads = 2;
constexpr std::int64_t kHeadWidth = kWidth / kHeads;

// Normalizes by the root mean square, computed in fp32 as in transformers.
at::Tensor normed(const at::Tensor& x, const at::Tensor& weight) {
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor variance = wide.pow(2).mean(-1, /*keepdim=*/true);
  return weight * (wide * at::rsqrt(variance + 1e-6)).to(x.scalar_type());
}

at::Tensor rotated(const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine) {
  const at::Tensor low = x.narrow(-1, 0, kHeadWidth / 2);
  const at::Tensor high = x.narrow(-1, kHeadWidth / 2, kHeadWidth / 2);
  return x * cosine + at::cat({-high, low}, -1) * sine;
}

at::Tensor in_heads(const at::Tensor& x) {
  return x.view({1, kTokens, kHeads, kHeadWidth}).transpose(1, 2);
}

}  // namespace

void warm_up(c10::Device place, c10::ScalarType dtype) {
  const c10::DeviceGuard on_place(place);
  const c10::AutoGradMode with_gradients(true);
  const at::TensorOptions there = at::TensorOptions().device(place);
  const auto weight = [&](at::IntArrayRef shape) {
    return at::ones(shape, there.dtype(dtype)).set_requires_grad(true);
  };
  const at::Tensor ids = at::arange(kTokens, there.dtype(at::kLong)).view({1, kTokens});
  const at::Tensor table = weight({kTokens, kWidth});
  const at::Tensor scale = weight({kWidth});
  const at::Tensor project = weight({kWidth, kWidth});

  const at::Tensor places = ids.to(at::kFloat).view({1, 1, kTokens});
  const at::Tensor rates = at::ones({1, kHeadWidth / 2, 1}, there.dtype(at::kFloat));
  const at::Tensor half = at::matmul(rates, places).transpose(1, 2);
  const at::Tensor angles = at::cat({half, half}, -1);
  const at::Tensor cosine = angles.cos().to(dtype).unsqueeze(1);
  const at::Tensor sine = angles.sin().to(dtype).unsqueeze(1);

  at::Tensor x = at::embedding(table, ids);
  const at::Tensor query = in_heads(at::linear(normed(x, scale), project));
  const at::Tensor attended = at::scaled_dot_product_attention(
      rotated(query, cosine, sine), rotated(query, cosine, sine), query, {}, 0.0, true);
  x = x + at::linear(attended.transpose(1, 2).reshape({1, kTokens, kWidth}), project);
  const at::Tensor inner = at::linear(normed(x, scale), project);
  x = x + at::linear(at::silu(inner) * inner, project);
  const at::Tensor logits = at::linear(normed(x, scale), table).to(at::kFloat);
  at::cross_entropy_loss(logits.view({kTokens, kTokens}), ids.view({kTokens})).backward();
  current_stream(place).synchronize();
}

}  // namespace strata::torch

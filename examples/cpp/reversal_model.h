// A small decoder-only transformer. Its forward calls its parts through `call`. That is its only
// difference from a model without the engine: before a trainer sets `call`, it is a plain libtorch
// model.
#pragma once

#include <torch/torch.h>

#include "strata/torch/scoped_call.h"

struct ModelSizes {
  int64_t vocabulary = 0;
  int64_t positions = 0;
  int64_t width = 64;
  int64_t heads = 4;
  int64_t layers = 3;
};

// Attention and a feed-forward part. The engine makes units of classes that occur more than once in
// a ModuleList: it gathers each when it runs, and releases it afterwards.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const ModelSizes& sizes)
      : heads(sizes.heads),
        norm1(register_module("norm1", torch::nn::LayerNorm(norm_options(sizes)))),
        qkv(register_module("qkv", torch::nn::Linear(sizes.width, 3 * sizes.width))),
        out(register_module("out", torch::nn::Linear(sizes.width, sizes.width))),
        norm2(register_module("norm2", torch::nn::LayerNorm(norm_options(sizes)))),
        up(register_module("up", torch::nn::Linear(sizes.width, 4 * sizes.width))),
        down(register_module("down", torch::nn::Linear(4 * sizes.width, sizes.width))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    const int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts = qkv(norm1(x)).view({batch, length, 3, heads, width / heads}).unbind(2);
    const auto attended = torch::scaled_dot_product_attention(
        parts[0].transpose(1, 2), parts[1].transpose(1, 2), parts[2].transpose(1, 2), {}, 0.0,
        /*is_causal=*/true);
    const auto h = x + out(attended.transpose(1, 2).reshape({batch, length, width}));
    return h + down(torch::gelu(up(norm2(h))));
  }

  static torch::nn::LayerNormOptions norm_options(const ModelSizes& sizes) {
    return torch::nn::LayerNormOptions({sizes.width});
  }

  int64_t heads;
  torch::nn::LayerNorm norm1;
  torch::nn::Linear qkv, out;
  torch::nn::LayerNorm norm2;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(const ModelSizes& sizes)
      : embedding(
            register_module("embedding", torch::nn::Embedding(sizes.vocabulary, sizes.width))),
        positions(
            register_parameter("positions", 0.02 * torch::randn({sizes.positions, sizes.width}))),
        norm(register_module("norm", torch::nn::LayerNorm(BlockImpl::norm_options(sizes)))) {
    torch::nn::init::normal_(embedding->weight, 0.0, 0.02);
    for (int64_t i = 0; i < sizes.layers; ++i) blocks->push_back(Block(sizes));
    register_module("blocks", blocks);
  }

  torch::Tensor forward(const torch::Tensor& tokens) {
    // The root's own parameters, such as `positions`, are gathered while its forward runs.
    auto h = call(*embedding, tokens) + positions.slice(0, 0, tokens.size(1));
    for (const auto& block : *blocks) h = call(*block->as<Block>(), h);
    // Tied: the embedding's weight is read outside of the embedding's own forward.
    return torch::linear(call(*norm, h), call.read(embedding->weight));
  }

  strata::torch::ScopedCall call;
  torch::nn::Embedding embedding;
  torch::Tensor positions;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
};
TORCH_MODULE(Model);

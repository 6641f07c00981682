#include "strata/torch/adoption.h"

#include <ATen/ops/empty.h>
#include <xxhash.h>

#include <algorithm>

#include "strata/base/error.h"
#include "strata/engine/consistency.h"
#include "strata/memory/host_buffer.h"
#include "strata/torch/dtype.h"

namespace strata::torch {
namespace {

constexpr Numel kPiece{std::int64_t{2} << 20};  // elements sent at once

std::span<const std::byte> bytes_of_tensor(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()),
          static_cast<std::size_t>(tensor.nbytes())};
}

bool has_own_values(const ModelParameter& parameter) {
  return parameter.has_values && parameter.owner == nullptr;
}

// From models that hold these parameters sharded: one unit of theirs is whole at a time.
void take_over(engine::Engine& engine, const std::vector<ModelParameter>& parameters) {
  // In an order that all ranks share, since the end of each is collective.
  std::vector<std::shared_ptr<ShardedModel>> owners;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const ModelParameter& parameter = parameters[i];
    if (parameter.owner == nullptr) continue;
    const int params[] = {parameter.owner_index};
    parameter.owner->gather(params);
    const at::Tensor& values = parameter.owner->parameters().full_view(parameter.owner_index);
    engine.weights().store(static_cast<int>(i), Numel(), Numel(values.numel()),
                           bytes_of_tensor(values).data(), from_scalar_type(values.scalar_type()));
    parameter.owner->release(params, true);
    if (std::find(owners.begin(), owners.end(), parameter.owner) == owners.end())
      owners.push_back(parameter.owner);
  }
  if (owners.empty()) return;
  engine.collectives().barrier();  // peers have read what is about to go
  for (const auto& owner : owners) owner->destroy(false);
}

// Which parameters differ from rank 0 on any rank; the same answer on every rank.
std::vector<bool> find_differences(comm::Collectives& collectives,
                                   const std::vector<ModelParameter>& parameters) {
  std::vector<bool> differs(parameters.size());
  if (collectives.world_size() == 1) return differs;
  std::string what;
  std::string hashes;
  for (const ModelParameter& parameter : parameters) {
    what += fmt::format(
        "parameter {} is built as {}\n", parameter.name,
        has_own_values(parameter) ? c10::toString(parameter.variable.scalar_type()) : "empty");
    std::uint64_t hash = 0;
    if (has_own_values(parameter)) {
      const at::Tensor values = parameter.variable.detach().contiguous();
      const auto bytes = bytes_of_tensor(values);
      hash = XXH3_64bits(bytes.data(), bytes.size());
    }
    hashes.append(reinterpret_cast<const char*>(&hash), sizeof(hash));
  }
  engine::require_same_text(collectives, "model", what);
  const std::vector<std::string> all = collectives.all_gather_text(hashes);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto at = [&](std::size_t rank) {
      return std::string_view(all[rank]).substr(i * sizeof(std::uint64_t), sizeof(std::uint64_t));
    };
    for (std::size_t r = 1; r < all.size(); ++r) differs[i] = differs[i] || at(r) != at(0);
  }
  return differs;
}

void send_from_rank_0(engine::Engine& engine, int param, const at::Tensor& values, DType dtype) {
  const Numel numel = engine.weights().param(param).numel();
  memory::HostBufferOptions options;
  options.ledger = engine.device().ledger();
  memory::HostBuffer piece(bytes_of(std::min(numel, kPiece), dtype), options);
  for (Numel begin; begin < numel; begin += kPiece) {
    const Numel count = std::min(kPiece, numel - begin);
    const Bytes bytes = bytes_of(count, dtype);
    const std::span<std::byte> target = piece.bytes().first(bytes.size());
    if (engine.collectives().rank() == 0) {
      const auto source =
          bytes_of_tensor(values).subspan(bytes_of(begin, dtype).size(), bytes.size());
      std::copy(source.begin(), source.end(), target.begin());
    }
    engine.collectives().broadcast(target, 0);
    engine.weights().store(param, begin, count, target.data(), dtype);
  }
}

}  // namespace

void adopt_values(engine::Engine& engine, const std::vector<ModelParameter>& parameters) {
  const std::vector<bool> differs = find_differences(engine.collectives(), parameters);
  take_over(engine, parameters);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const ModelParameter& parameter = parameters[i];
    if (!has_own_values(parameter)) continue;
    at::Tensor variable = parameter.variable;
    const DType dtype = from_scalar_type(variable.scalar_type());
    {
      const at::Tensor values = variable.detach().contiguous();
      const int param = static_cast<int>(i);
      if (differs[i]) {
        send_from_rank_0(engine, param, values, dtype);
      } else {
        engine.weights().store(param, Numel(), Numel(values.numel()),
                               bytes_of_tensor(values).data(), dtype);
      }
    }
    variable.set_data(at::empty({0}, variable.options().requires_grad(false)));
  }
}

}  // namespace strata::torch

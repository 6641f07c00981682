#include "strata/torch/start/owner_intake.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <memory>
#include <string>

namespace strata::torch {
namespace {

// A parameter of at most this many pieces is gathered at once, because each piece costs the ranks a
// few milliseconds, however small it is.
constexpr std::int64_t kWholePieces = 32;

// For each parameter that has an owner: whether every rank keeps exactly the part that its shard
// holds already.
std::vector<bool> cut_alike(engine::Engine& engine, const std::vector<ModelParameter>& parameters) {
  std::string mine;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].owner == nullptr) continue;
    const int param = static_cast<int>(i);
    const bool alike = !parameters[i].tile && !engine.weights().unit_of(param).whole &&
                       parameters[i].owner->owned_range(parameters[i].owner_index) ==
                           engine.weights().owned_range(param);
    mine += alike ? '1' : '0';
  }
  std::vector<bool> all(mine.size(), true);
  if (mine.empty()) return all;
  for (const std::string& text : engine.collectives().all_gather_text(mine)) {
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = all[i] && text[i] == '1';
  }
  return all;
}

bool may_be_whole(const ModelParameter& parameter, Bytes piece) {
  if (parameter.tile) return false;  // nor is it whole in training
  const std::int64_t bytes =
      c10::multiply_integers(parameter.shape) * parameter.variable.element_size();
  return bytes <= kWholePieces * piece.value;
}

bool same_source(const ModelParameter& a, const ModelParameter& b) {
  return a.owner == b.owner && a.owner_index == b.owner_index;
}

// Stores lent elements of a parameter, from `begin` on, in the engine's parameters: the same one,
// or its tiles, which follow each other from `first` on.
void store_lent(ValueIntake& intake, const std::vector<ModelParameter>& parameters,
                std::size_t first, Numel begin, const at::Tensor& values) {
  const ModelParameter& lent = parameters[first];
  if (!lent.tile) return intake.store(static_cast<int>(first), begin, values);
  const at::Tensor flat = values.reshape({-1});
  const std::int64_t end = begin.value + flat.numel();
  for (std::size_t i = first; i < parameters.size(); ++i) {
    const ModelParameter& tile = parameters[i];
    if (!same_source(tile, lent)) break;
    const std::int64_t tile_begin = tile.tile->first.value;
    const std::int64_t tile_end = tile_begin + c10::multiply_integers(tile.shape);
    const std::int64_t from = std::max(begin.value, tile_begin);
    const std::int64_t to = std::min(end, tile_end);
    if (from >= to) continue;
    intake.store(static_cast<int>(i), Numel(from - tile_begin),
                 flat.slice(0, from - begin.value, to - begin.value));
  }
}

}  // namespace

void take_from_owners(engine::Engine& engine, ValueIntake& intake,
                      const std::vector<ModelParameter>& parameters, Bytes piece) {
  const std::vector<bool> alike = cut_alike(engine, parameters);
  // In an order that all ranks share, since retiring an owner is collective.
  std::vector<std::shared_ptr<ParameterOwner>> owners;
  std::size_t position = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const ModelParameter& parameter = parameters[i];
    if (parameter.owner == nullptr) continue;
    const bool own_part = alike[position++];
    if (i > 0 && same_source(parameter, parameters[i - 1])) continue;  // lent with the first tile
    const Borrowing borrowing{piece, own_part, may_be_whole(parameter, piece),
                              [&](Numel begin, const at::Tensor& values) {
                                store_lent(intake, parameters, i, begin, values);
                              }};
    parameter.owner->lend_values(parameter.owner_index, borrowing);
    if (std::find(owners.begin(), owners.end(), parameter.owner) == owners.end())
      owners.push_back(parameter.owner);
  }
  if (owners.empty()) return;
  engine.collectives().barrier();  // peers have read the memory that is freed next
  for (const auto& owner : owners) owner->retire();
  engine.collectives().barrier();  // all have freed their shards
  for (const auto& owner : owners) owner->unmap_freed();
}

}  // namespace strata::torch

#include "strata/torch/start/owner_intake.h"

#include <algorithm>
#include <memory>
#include <string>

namespace strata::torch {
namespace {

// By parameter that has an owner, whether every rank keeps of it what its shard has already.
std::vector<bool> cut_alike(engine::Engine& engine, const std::vector<ModelParameter>& parameters) {
  std::string mine;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].owner == nullptr) continue;
    const int param = static_cast<int>(i);
    const bool alike = !engine.weights().unit_of(param).whole &&
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

}  // namespace

void take_from_owners(engine::Engine& engine, ValueIntake& intake,
                      const std::vector<ModelParameter>& parameters, Bytes piece) {
  const std::vector<bool> alike = cut_alike(engine, parameters);
  // In an order that all ranks share, since the end of each is collective.
  std::vector<std::shared_ptr<ParameterOwner>> owners;
  std::size_t position = 0;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const ModelParameter& parameter = parameters[i];
    if (parameter.owner == nullptr) continue;
    const Borrowing borrowing{piece, alike[position++], [&](Numel begin, const at::Tensor& values) {
                                intake.store(static_cast<int>(i), begin, values);
                              }};
    parameter.owner->lend_values(parameter.owner_index, borrowing);
    if (std::find(owners.begin(), owners.end(), parameter.owner) == owners.end())
      owners.push_back(parameter.owner);
  }
  if (owners.empty()) return;
  engine.collectives().barrier();  // peers have read what is about to go
  for (const auto& owner : owners) owner->retire();
}

}  // namespace strata::torch

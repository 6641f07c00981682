#include "strata/engine/checkpoint/saved_shards.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

using format::kValue;

void add_kind(std::vector<std::string>& kinds, std::string_view kind) {
  if (std::ranges::find(kinds, kind) == kinds.end()) kinds.emplace_back(kind);
}

std::string file_name(std::string_view what, const comm::ShardPosition& place) {
  return fmt::format("{}-{:05}-of-{:05}.safetensors", what, place.index, place.count);
}

// Parts of a file while they are listed.
struct ListedParts {
  std::vector<checkpoint::TensorRange> parts;
  std::vector<ShardSource> sources;

  void add(checkpoint::TensorRange part, ShardSource source) {
    part.shape = {(part.end - part.begin).value};
    part.source = sources.size();
    parts.push_back(std::move(part));
    sources.push_back(source);
  }
  ShardFile file(std::string name) {
    return {checkpoint::FileLayout(std::move(name), std::move(parts)), std::move(sources)};
  }
};

constexpr std::size_t kLeftOut = static_cast<std::size_t>(-1);

// Adds the parameters, each once, whatever tiles it has. By parameter of the engine: which tensor
// it is of, or kLeftOut.
std::vector<std::size_t> add_parameters(SavedShards& saved, const Weights& weights,
                                        const SavedContent& content) {
  std::vector<std::size_t> tensor_of(static_cast<std::size_t>(weights.param_count()), kLeftOut);
  std::map<std::string_view, std::size_t> cut;  // the tensors of parameters that have tiles
  for (int p = 0; p < weights.param_count(); ++p) {
    const plan::ParamSpec& param = weights.param(p);
    if (!param.trainable && !content.frozen) continue;
    const auto index = static_cast<std::size_t>(p);
    tensor_of[index] = saved.tensors.size();
    if (param.tile) {
      const auto [place, is_new] = cut.emplace(param.tile->name, saved.tensors.size());
      tensor_of[index] = place->second;
      if (!is_new) continue;
    }
    saved.tensors.push_back(
        {param.known_name(), format::TensorRole::kParameter, param.known_shape(), param.dtype,
         param.trainable,
         index < content.aliases.size() ? content.aliases[index] : std::vector<std::string>{},
         param.reordered()});
  }
  return tensor_of;
}

}  // namespace

std::vector<std::string> kinds_of(Engine& engine, const ShardStates& states,
                                  const SavedContent& content) {
  std::vector<std::string> kinds = {std::string(kValue)};
  for (const Unit& unit : engine.weights().units()) {
    for (const std::string_view kind : states.kinds_of(unit.id)) add_kind(kinds, kind);
  }
  for (const ExtraState& state : content.states) add_kind(kinds, state.kind);
  return kinds;
}

SavedShards plan_saved_shards(Engine& engine, const ShardStates& states,
                              const SavedContent& content,
                              std::span<const std::string> kinds_of_all) {
  Weights& weights = engine.weights();
  SavedShards saved;
  saved.kinds = {std::string(kValue)};
  for (const std::string& kind : kinds_of_all) add_kind(saved.kinds, kind);
  const std::vector<std::size_t> tensor_of = add_parameters(saved, weights, content);
  const comm::ShardPosition place = engine.collectives().shard_position();
  ListedParts values;
  ListedParts kept;
  if (place.group == 0) {
    for (const Unit& unit : weights.units()) {
      const std::vector<plan::ShardRange> pieces = unit.layout.pieces(place.index);
      for (const std::string_view kind : states.kinds_of(unit.id)) {
        for (const plan::ShardRange& piece : pieces) {
          const int p = unit.layout.slots()[static_cast<std::size_t>(piece.slot)].param;
          const std::size_t tensor = tensor_of[static_cast<std::size_t>(p)];
          if (tensor == kLeftOut || piece.param_begin == piece.param_end) continue;
          const Numel first = weights.param(p).known_first();
          (kind == kValue ? values : kept)
              .add(
                  {tensor, weights.param(p).name, std::string(kind), states.dtype_of(unit.id, kind),
                   first + piece.param_begin, first + piece.param_end},
                  ShardOffset{unit.id, piece.shard_offset});
        }
      }
    }
    for (const ExtraState& state : content.states) {
      const std::size_t tensor = tensor_of.at(static_cast<std::size_t>(state.param));
      const auto [begin, end] = weights.owned_range(state.param);
      if (tensor == kLeftOut || begin == end) continue;
      const plan::ParamSpec& param = weights.param(state.param);
      kept.add({tensor, param.name, state.kind, state.dtype, param.known_first() + begin,
                param.known_first() + end},
               state.memory);
    }
  }
  ListedParts own;  // of this rank alone
  const int rank = engine.collectives().rank();
  for (const ExtraTensor& extra : content.tensors) {
    const auto tensor = saved.tensors.size();
    saved.tensors.push_back(extra.tensor);
    const Numel numel(Bytes(extra.bytes.size()) / size_of(extra.tensor.dtype));
    if (rank != extra.rank || numel.value == 0) continue;
    (rank == 0 ? values : own)
        .add({tensor, fmt::format("{}:{}", name_of(extra.tensor.role), extra.tensor.name),
              std::string(kValue), extra.tensor.dtype, Numel(), numel},
             extra.bytes.data());
  }
  if (!own.parts.empty())
    saved.files.push_back(own.file(fmt::format("buffers-{:05}.safetensors", rank)));
  if (place.group != 0) return saved;
  saved.files.push_back(values.file(file_name("model", place)));
  if (saved.kinds.size() > 1) saved.files.push_back(kept.file(file_name("optimizer", place)));
  return saved;
}

std::vector<const checkpoint::FileLayout*> SavedShards::layouts() const {
  std::vector<const checkpoint::FileLayout*> all;
  for (const ShardFile& file : files) all.push_back(&file.layout);
  return all;
}

std::unique_ptr<io::Transfer> ShardFileSource::fill(checkpoint::Piece& piece,
                                                    std::span<std::byte>) {
  file_.layout.fill(
      piece.offset, piece.content, [&](std::size_t i, Bytes at, std::span<std::byte> target) {
        const checkpoint::TensorRange& part = file_.layout.parts()[i];
        const ShardSource& source = file_.sources[part.source];
        if (const auto* const memory = std::get_if<const std::byte*>(&source)) {
          device_.copy(target, {*memory + at.size(), target.size()}, device_.compute_stream());
          return;
        }
        const Bytes element = size_of(part.dtype);
        const Bytes bytes(target.size());
        STRATA_ASSERT(at % element == Bytes() && bytes % element == Bytes());
        const auto& run = std::get<ShardOffset>(source);
        states_.enqueue_read(run.unit, part.kind, run.first + Numel(at / element),
                             Numel(bytes / element), target);
      });
  return nullptr;
}

}  // namespace strata::engine

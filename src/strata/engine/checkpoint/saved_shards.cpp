#include "strata/engine/checkpoint/saved_shards.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

using format::kValue;

void add_kind(std::vector<std::string>& kinds, std::string_view kind) {
  if (std::ranges::find(kinds, kind) == kinds.end()) kinds.emplace_back(kind);
}

using Parts = std::vector<checkpoint::TensorRange>;

checkpoint::TensorRange& add_part(Parts& parts, std::size_t tensor, const std::string& name,
                                  std::string_view kind, DType dtype, Numel begin, Numel end) {
  const std::int64_t numel = (end - begin).value;
  parts.push_back({tensor, name, std::string(kind), dtype, begin, end, {numel}});
  return parts.back();
}

constexpr std::size_t kLeftOut = static_cast<std::size_t>(-1);

// Adds the parameters, each once, whatever tiles it has. By parameter of the engine: which tensor
// it is of, or kLeftOut.
std::vector<std::size_t> add_parameters(std::vector<format::ManifestTensor>& tensors,
                                        const Weights& weights, const SavedContent& content) {
  std::vector<std::size_t> tensor_of(static_cast<std::size_t>(weights.param_count()), kLeftOut);
  std::map<std::string_view, std::size_t> cut;  // the tensors of parameters that have tiles
  for (int p = 0; p < weights.param_count(); ++p) {
    const plan::ParamSpec& param = weights.param(p);
    if (!param.trainable && !content.frozen) continue;
    const auto index = static_cast<std::size_t>(p);
    tensor_of[index] = tensors.size();
    if (param.tile) {
      const auto [place, is_new] = cut.emplace(param.tile->name, tensors.size());
      tensor_of[index] = place->second;
      if (!is_new) continue;
    }
    tensors.push_back(
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
  std::vector<format::ManifestTensor>& tensors = saved.manifest.tensors;
  std::vector<std::string>& kinds = saved.manifest.kinds;
  kinds = {std::string(kValue)};
  for (const std::string& kind : kinds_of_all) add_kind(kinds, kind);
  const std::vector<std::size_t> tensor_of = add_parameters(tensors, weights, content);
  const comm::ShardPosition place = engine.collectives().shard_position();
  Parts values;
  Parts kept;
  if (place.group == 0) {
    for (const Unit& unit : weights.units()) {
      const std::vector<plan::ShardRange> pieces = unit.layout.pieces(place.index);
      for (const std::string_view kind : states.kinds_of(unit.id)) {
        for (const plan::ShardRange& piece : pieces) {
          const int p = unit.layout.slots()[static_cast<std::size_t>(piece.slot)].param;
          const std::size_t tensor = tensor_of[static_cast<std::size_t>(p)];
          if (tensor == kLeftOut || piece.param_begin == piece.param_end) continue;
          const Numel first = weights.param(p).known_first();
          const auto numbers = [&](Numel elements) { return format::numel_of(kind, elements); };
          checkpoint::TensorRange& part =
              add_part(kind == kValue ? values : kept, tensor, weights.param(p).name, kind,
                       states.dtype_of(unit.id, kind), numbers(first + piece.param_begin),
                       numbers(first + piece.param_end));
          part.shard = unit.id;
          part.shard_offset = numbers(piece.shard_offset);
        }
      }
    }
    for (const ExtraState& state : content.states) {
      const std::size_t tensor = tensor_of.at(static_cast<std::size_t>(state.param));
      const plan::ParamSpec& param = weights.param(state.param);
      const bool whole = state.numel == param.numel();
      const auto [begin, end] =
          whole ? std::pair(Numel(), state.numel) : weights.owned_range(state.param);
      if (tensor == kLeftOut || begin == end) continue;
      const Numel first = param.known_first();
      add_part(kept, tensor, param.name, state.kind, state.dtype, first + begin, first + end)
          .memory = state.memory;
    }
  }
  Parts own;  // of this rank alone
  const int rank = engine.collectives().rank();
  for (const ExtraTensor& extra : content.tensors) {
    const std::size_t tensor = tensors.size();
    tensors.push_back(extra.tensor);
    const Numel numel(Bytes(extra.bytes.size()) / size_of(extra.tensor.dtype));
    if (rank != extra.rank || numel.value == 0) continue;
    const std::string name = fmt::format("{}:{}", name_of(extra.tensor.role), extra.tensor.name);
    add_part(rank == 0 ? values : own, tensor, name, kValue, extra.tensor.dtype, Numel(), numel)
        .memory = extra.bytes.data();
  }
  const auto shard_name = [&](std::string_view what) {
    return fmt::format("{}-{:05}-of-{:05}.safetensors", what, place.index, place.count);
  };
  if (!own.empty())
    saved.files.emplace_back(fmt::format("buffers-{:05}.safetensors", rank), std::move(own));
  if (place.group != 0) return saved;
  saved.files.emplace_back(shard_name("model"), std::move(values));
  if (kinds.size() > 1) saved.files.emplace_back(shard_name("optimizer"), std::move(kept));
  return saved;
}

SavedShards plan_together(Engine& engine, const ShardStates& states, const SavedContent& content) {
  // A rank whose shards hold nothing of a parameter does not know what is kept of it.
  std::string mine;
  for (const std::string& kind : kinds_of(engine, states, content)) mine += kind + "\n";
  std::vector<std::string> kinds;
  for (const std::string& text : engine.collectives().all_gather_text(mine)) {
    std::istringstream lines(text);
    for (std::string kind; std::getline(lines, kind);) kinds.push_back(kind);
  }
  return plan_saved_shards(engine, states, content, kinds);
}

Bytes SavedShards::copied() const {
  Bytes bytes;
  for (const checkpoint::FileLayout& file : files)
    bytes += align_up(file.bytes(), io::File::kDirectBlock);
  return bytes;
}

checkpoint::WholeFile shard_file(const checkpoint::FileLayout& file, ShardStates& states,
                                 device::Device& device, Bytes piece) {
  const auto fill_part = [&](std::size_t i, Bytes at, std::span<std::byte> target) {
    const checkpoint::TensorRange& part = file.parts()[i];
    if (part.memory != nullptr) {
      device.copy(target, {part.memory + at.size(), target.size()}, device.compute_stream());
      return;
    }
    const Bytes element = size_of(part.dtype);
    const Bytes bytes(target.size());
    STRATA_ASSERT(at % element == Bytes() && bytes % element == Bytes());
    states.enqueue_read(part.shard, part.kind, part.shard_offset + Numel(at / element),
                        Numel(bytes / element), target);
  };
  return {file.bytes(), piece,
          [&file, fill_part](Bytes at, std::span<std::byte> target) {
            file.fill(at, target, fill_part);
          },
          &device.compute_stream()};
}

}  // namespace strata::engine

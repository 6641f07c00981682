#include "strata/torch/start/lending.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/engine/checkpoint/weight_loader.h"
#include "strata/io/process_memory.h"
#include "strata/io/thread_engine.h"
#include "strata/memory/host_buffer.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/base/tensors.h"
#include "strata/torch/model/value_access.h"
#include "strata/torch/start/adoption.h"

namespace strata::torch {
namespace {

// A parameter of at most this many pieces is gathered at once, because each piece costs the ranks a
// few milliseconds, however small it is.
constexpr std::int64_t kWholePieces = 32;

constexpr std::string_view kNotPermitted = "not permitted: ";
// A read of another process's memory takes about 0.1 ms before its first byte.
constexpr Bytes kReadPiece = 2_MiB;

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

// The values themselves if they are contiguous, else copies.
std::vector<at::Tensor> dense_values(const OriginalValues& values, std::span<const int> params,
                                     Bytes copied_most) {
  std::vector<at::Tensor> dense;
  Bytes copied;
  for (const int param : params) {
    const at::Tensor& tensor = values.of(param);
    if (!tensor.is_contiguous()) copied += Bytes(tensor.nbytes());
    if (copied > copied_most)
      throw UsageError("more than {} of values are not contiguous", to_string(copied_most));
    dense.push_back(tensor.contiguous());
  }
  return dense;
}

// One rank's state while the ranks read rank 0's memory.
struct Attempt {
  std::vector<at::Tensor> values;              // rank 0's, in the order of its parameters
  std::unique_ptr<io::OfferedMemory> offered;  // rank 0's
  std::shared_ptr<io::ProcessMemory> memory;   // as every rank reads it
  std::optional<format::WeightMap> map;
  std::unique_ptr<io::ThreadEngine> io;
  std::string why_not;
};

// Runs a rank's work between two sync points. It keeps errors, so that the rank always reaches the
// next sync point.
template <typename Step>
void attempt_to(Attempt& attempt, Step&& step) {
  try {
    attempt.why_not.clear();
    std::forward<Step>(step)();
  } catch (const io::NotPermitted& error) {
    attempt.why_not = std::string(kNotPermitted) + error.what();
  } catch (const std::exception& error) {
    attempt.why_not = error.what();
  }
}

void offer(Attempt& attempt, const OriginalValues& values, std::span<const int> params,
           Bytes copied_most) {
  attempt.values = dense_values(values, params, copied_most);
  std::vector<std::span<const std::byte>> parts;
  for (const at::Tensor& tensor : attempt.values) parts.push_back(const_bytes(tensor));
  if (memory::shares_pages(parts)) throw UsageError("another process has the same pages");
  attempt.offered = std::make_unique<io::OfferedMemory>(parts);
}

bool nobody_but_the_system_objects(std::span<const std::string> reasons) {
  const auto refused = [](const std::string& why) { return why.starts_with(kNotPermitted); };
  return std::ranges::any_of(reasons, refused) &&
         std::ranges::all_of(reasons, [&](const auto& why) { return why.empty() || refused(why); });
}

void tell(engine::Engine& engine, const std::string& why_not) {
  engine.init_report().reason += fmt::format(
      "; ranks compare their values, since rank 0's cannot be read where they are ({})", why_not);
}

// Rank 0's memory as a file of tensors, in this order.
std::vector<format::CheckpointTensor> tensors_of(const engine::Weights& weights,
                                                 const OriginalValues& values,
                                                 std::span<const int> params,
                                                 const io::ProcessMemory& memory) {
  std::vector<format::CheckpointTensor> tensors;
  for (std::size_t i = 0; i < params.size(); ++i) {
    const plan::ParamSpec& param = weights.param(params[i]);
    const at::Tensor& tensor = values.of(params[i]);
    tensors.push_back({0,
                       {param.name, from_scalar_type(tensor.scalar_type()), param.shape,
                        Numel(tensor.numel()), memory.offset_of(i), Bytes(tensor.nbytes())}});
  }
  return tensors;
}

void open(Attempt& attempt, const std::string& text, const engine::Weights& weights,
          const OriginalValues& values, std::span<const int> params, int threads) {
  attempt.memory = std::make_shared<io::ProcessMemory>(text);
  attempt.map.emplace(engine::whole_tensors(weights.params()),
                      tensors_of(weights, values, params, *attempt.memory),
                      attempt.memory->file().path());
  io::EngineOptions options = reading_options(threads);
  options.piece = kReadPiece;
  attempt.io = std::make_unique<io::ThreadEngine>(options, attempt.memory);
}

}  // namespace

void ValueIntake::store(int param, Numel begin, const at::Tensor& values) {
  STRATA_ASSERT(values.is_contiguous() && values.device() == place_);
  engine_.weights().enqueue_store_everywhere(param, begin, Numel(values.numel()),
                                             const_bytes(values).data(),
                                             from_scalar_type(values.scalar_type()));
}

void ValueIntake::store_from_rank_0(int param, Numel begin, const at::Tensor& values) {
  if (piece_ == nullptr) piece_ = engine_.device().allocate(kPiece, memory::Kind::kStaging);
  STRATA_ASSERT(values.nbytes() <= piece_->bytes().size());
  at::Tensor piece =
      tensor_over(piece_->bytes().data(), values.numel(), values.scalar_type(), place_);
  if (engine_.collectives().rank() == 0) piece.copy_(values.detach().view({-1}));
  engine_.collectives().broadcast(mutable_bytes(piece), 0);
  store(param, begin, piece);
}

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

bool take_from_rank_0(engine::Engine& engine, const OriginalValues& values,
                      std::span<const int> on_host, int threads, Bytes copied_most) {
  comm::Collectives& ranks = engine.collectives();
  if (ranks.world_size() == 1) return false;
  const bool all = on_host.size() == static_cast<std::size_t>(values.size());
  Attempt attempt;
  if (all && ranks.rank() == 0)
    attempt_to(attempt, [&] { offer(attempt, values, on_host, copied_most); });
  const std::string mine = attempt.offered != nullptr ? attempt.offered->to_text() : "";
  const std::string offered = ranks.all_gather_text(mine).front();
  const auto meet_with_readers = [&] {
    if (!all) attempt.why_not = "not all values are on the host";
    if (all && !offered.empty())
      attempt_to(attempt,
                 [&] { open(attempt, offered, engine.weights(), values, on_host, threads); });
    return ranks.all_gather_text(attempt.why_not);
  };
  std::vector<std::string> reasons = meet_with_readers();
  if (nobody_but_the_system_objects(reasons)) {
    if (attempt.offered != nullptr) attempt.offered->permit_siblings();
    ranks.barrier();
    reasons = meet_with_readers();
  }
  if (const auto rank = comm::first_text(reasons)) {
    if (all) tell(engine, fmt::format("rank {}: {}", *rank, reasons[*rank]));
    return false;
  }
  std::vector<int> params(on_host.size());
  std::iota(params.begin(), params.end(), 0);
  try {
    engine::LoadSource source{{&attempt.memory->file()}, *attempt.map, params, *attempt.io};
    source.way = std::nullopt;
    source.phase = "move in";
    source.in_slot_order = true;
    engine::load_weights_together(engine, source);
  } catch (const IoError& error) {  // on every rank: memory of a driver, perhaps
    tell(engine, error.what());
    ranks.barrier();  // reads that were begun have ended everywhere
    return false;
  }
  return true;
}

bool lend_pieces(engine::Engine& engine, c10::Device place, int param, const Borrowing& borrowing) {
  const comm::ShardPosition position = engine.collectives().shard_position();
  const bool gathers = borrowing.may_be_whole && !borrowing.own_part;
  if (gathers || position.groups > 1 || position.parts > 1) return false;
  const engine::Weights& weights = engine.weights();
  const engine::Unit& unit = weights.unit_of(param);
  const DType dtype = unit.layout.dtype();
  const Numel most(std::max<std::int64_t>(1, borrowing.piece / size_of(dtype)));
  std::unique_ptr<device::Memory> piece;  // null: not needed yet
  const auto use = [&](Numel begin, const std::byte* values, Numel count) {
    borrowing.use(begin, tensor_over(values, count.value, to_scalar_type(dtype), place));
  };
  // Piece by piece; of another rank, or for others, by broadcasts.
  const auto lend_from = [&](int rank) {
    const auto [begin, end] = range_in_shard(weights, param, rank);
    for (Numel at = begin; at < end; at += most) {
      const Numel count = std::min(most, end - at);
      if (piece == nullptr)
        piece = engine.device().allocate(bytes_of(most, dtype), memory::Kind::kStaging);
      const std::span<std::byte> bytes = piece->bytes().first(bytes_of(count, dtype).size());
      if (rank == position.index) read_own(engine, param, at, at + count, bytes.data());
      if (!borrowing.own_part) engine.collectives().broadcast(bytes, rank);
      use(at, bytes.data(), count);
    }
  };
  const auto [begin, end] = range_in_shard(weights, param, position.index);
  if (!borrowing.own_part) {
    for (int rank = 0; rank < unit.layout.world_size(); ++rank) lend_from(rank);
  } else if (begin < end && !unit.offloaded) {  // lent in place
    const Numel at = offset_in_shard(engine, param, begin);
    use(begin, unit.shard.data() + bytes_of(at, dtype).size(), end - begin);
  } else {
    lend_from(position.index);
  }
  engine.device().compute_stream().synchronize();  // the piece's memory is freed now
  return true;
}

}  // namespace strata::torch

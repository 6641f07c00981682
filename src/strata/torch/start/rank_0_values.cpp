#include "strata/torch/start/rank_0_values.h"

#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/engine/checkpoint/weight_loader.h"
#include "strata/io/process_memory.h"
#include "strata/io/thread_engine.h"
#include "strata/memory/system_memory.h"
#include "strata/torch/base/host_threads.h"
#include "strata/torch/base/tensors.h"

namespace strata::torch {
namespace {

constexpr std::string_view kNotPermitted = "not permitted: ";
// A read of another process's memory takes about 0.1 ms before its first byte.
constexpr Bytes kPiece = 2_MiB;

// The values themselves if they are contiguous, else copies.
std::vector<at::Tensor> dense_values(const OriginalValues& values, std::span<const int> params,
                                     Bytes copied_most) {
  std::vector<at::Tensor> dense;
  Bytes copied;
  for (const int param : params) {
    const at::Tensor& tensor = values.of(param);
    if (!tensor.is_contiguous()) copied += Bytes(tensor.nbytes());
    if (copied > copied_most) {
      throw UsageError(
          fmt::format("more than {} of values are not contiguous", to_string(copied_most)));
    }
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
  io::ThreadEngineOptions options = reading_options(threads);
  options.piece = kPiece;
  attempt.io = std::make_unique<io::ThreadEngine>(options, attempt.memory);
}

}  // namespace

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

}  // namespace strata::torch

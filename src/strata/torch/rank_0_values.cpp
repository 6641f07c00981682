#include "strata/torch/rank_0_values.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/engine/joint_loading.h"
#include "strata/io/process_memory.h"
#include "strata/io/thread_engine.h"
#include "strata/memory/page_sharing.h"
#include "strata/torch/dtype.h"
#include "strata/torch/host_threads.h"

namespace strata::torch {
namespace {

std::vector<std::span<const std::byte>> parts_of(const OriginalValues& values,
                                                 std::span<const int> params) {
  std::vector<std::span<const std::byte>> parts;
  for (const int param : params) {
    const at::Tensor& tensor = values.of(param);
    parts.emplace_back(static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  return parts;
}

bool all_contiguous(const OriginalValues& values, std::span<const int> params) {
  return std::ranges::all_of(params, [&](int param) { return values.of(param).is_contiguous(); });
}

// One rank's part in finding out whether all can read rank 0's memory.
struct Attempt {
  std::unique_ptr<io::OfferedMemory> offered;  // rank 0's
  std::shared_ptr<io::ProcessMemory> memory;   // as every rank reads it
  std::string why_not;
};

void offer(Attempt& attempt, const OriginalValues& values, std::span<const int> params) {
  std::vector<std::span<const std::byte>> parts = parts_of(values, params);
  if (!all_contiguous(values, params)) {
    attempt.why_not = "some values are not contiguous";
  } else if (memory::shares_pages(parts)) {
    attempt.why_not = "another process has the same pages";
  } else {
    attempt.offered = std::make_unique<io::OfferedMemory>(std::move(parts));
  }
}

void open(Attempt& attempt, const std::string& text) {
  if (text.empty()) return;
  try {
    attempt.memory = std::make_shared<io::ProcessMemory>(text);
  } catch (const IoError& error) {
    attempt.why_not = error.what();
  }
}

void tell(engine::Engine& engine, const std::string& why_not) {
  engine.init_report().add_reason(fmt::format(
      "ranks compare their values, since rank 0's cannot be read where they are ({})", why_not));
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

}  // namespace

bool take_from_rank_0(engine::Engine& engine, const OriginalValues& values,
                      std::span<const int> on_host, int threads) {
  comm::Collectives& ranks = engine.collectives();
  if (ranks.world_size() == 1) return false;
  const bool all = on_host.size() == static_cast<std::size_t>(values.size());
  Attempt attempt;
  if (!all) attempt.why_not = "not all values are on the host";
  if (all && ranks.rank() == 0) offer(attempt, values, on_host);
  const std::string text = attempt.offered != nullptr ? attempt.offered->to_text() : "";
  const std::string offered = ranks.all_gather_text(text).front();
  if (all) open(attempt, offered);
  const std::vector<std::string> reasons = ranks.all_gather_text(attempt.why_not);
  if (const auto rank = comm::first_to_say(reasons)) {
    if (all) tell(engine, fmt::format("rank {}: {}", *rank, reasons[*rank]));
    return false;
  }
  const engine::Weights& weights = engine.weights();
  const format::WeightMap map(engine::whole_tensors(weights.params()),
                              tensors_of(weights, values, on_host, *attempt.memory),
                              attempt.memory->file().path());
  std::vector<int> params(on_host.size());
  std::iota(params.begin(), params.end(), 0);
  io::ThreadEngine io(reading_options(threads), attempt.memory);
  try {
    engine::load_weights_together(
        engine, {{&attempt.memory->file()}, map, params, io, {}, std::nullopt, "move in"});
  } catch (const IoError& error) {  // on every rank: memory of a driver, perhaps
    tell(engine, error.what());
    return false;
  }
  return true;
}

}  // namespace strata::torch

#include "strata/torch/rank_0_values.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "strata/base/error.h"
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

// What rank 0 lets the others read; null: it had better not.
std::unique_ptr<io::OfferedMemory> offer(const OriginalValues& values,
                                         std::span<const int> params) {
  const bool contiguous =
      std::ranges::all_of(params, [&](int param) { return values.of(param).is_contiguous(); });
  if (!contiguous) return nullptr;
  std::vector<std::span<const std::byte>> parts = parts_of(values, params);
  if (memory::shares_pages(parts)) return nullptr;
  return std::make_unique<io::OfferedMemory>(std::move(parts));
}

std::shared_ptr<io::ProcessMemory> open(const std::string& text) {
  if (text.empty()) return nullptr;
  try {
    return std::make_shared<io::ProcessMemory>(text);
  } catch (const IoError&) {
    return nullptr;
  }
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
  std::unique_ptr<io::OfferedMemory> offered;
  if (all && ranks.rank() == 0) offered = offer(values, on_host);
  const std::string text =
      ranks.all_gather_text(offered != nullptr ? offered->to_text() : std::string()).front();
  const std::shared_ptr<io::ProcessMemory> memory = all ? open(text) : nullptr;
  double least[] = {memory != nullptr ? 1.0 : 0.0};
  ranks.all_reduce(least, comm::ReduceOp::kMin);
  if (least[0] == 0.0) return false;
  const engine::Weights& weights = engine.weights();
  const format::WeightMap map(engine::whole_tensors(weights.params()),
                              tensors_of(weights, values, on_host, *memory), memory->file().path());
  std::vector<int> params(on_host.size());
  std::iota(params.begin(), params.end(), 0);
  io::ThreadEngine io(reading_options(threads), memory);
  engine::load_weights_together(engine,
                                {{&memory->file()}, map, params, io, {}, std::nullopt, "move in"});
  return true;
}

}  // namespace strata::torch

#include "strata/torch/cpp/module_checkpoint.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

#include <numeric>
#include <optional>

#include "strata/base/error.h"
#include "strata/engine/checkpoint/weight_loader.h"
#include "strata/engine/checkpoint/weight_saver.h"
#include "strata/engine/unit/agreement.h"
#include "strata/io/thread_engine.h"
#include "strata/torch/base/dtype.h"
#include "strata/torch/base/host_threads.h"

namespace strata::torch {
namespace {

// Everything that a load needs, made before the load changes a value.
struct LoadPlan {
  explicit LoadPlan(const std::string& path) : index(path) {}

  format::CheckpointIndex index;
  std::optional<format::WeightMap> map;
};

std::span<const std::byte> tensor_bytes(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()),
          static_cast<std::size_t>(tensor.nbytes())};
}

void check_buffer(const format::CheckpointIndex& index, const std::string& name,
                  const at::Tensor& buffer) {
  const format::CheckpointTensor* tensor = index.find(name);
  if (tensor == nullptr) {
    throw FormatError(fmt::format("{}: the module's buffer '{}' is missing", index.path(), name));
  }
  const DType dtype = from_scalar_type(buffer.scalar_type());
  if (tensor->info.shape == buffer.sizes().vec() && tensor->info.dtype == dtype) return;
  throw FormatError(fmt::format(
      "{}: the buffer '{}' must have the module's dtype and shape, {} [{}]; found {} [{}]",
      index.path(), name, name_of(dtype), fmt::join(buffer.sizes(), ", "),
      name_of(tensor->info.dtype), fmt::join(tensor->info.shape, ", ")));
}

void read_buffer(const format::CheckpointIndex& index, const std::string& name, at::Tensor buffer,
                 io::IoEngine& io) {
  const format::CheckpointTensor& tensor = *index.find(name);
  const bool direct = buffer.is_contiguous() && buffer.is_cpu();
  at::Tensor dense =
      direct ? buffer : at::empty(buffer.sizes(), at::TensorOptions().dtype(buffer.scalar_type()));
  const std::span<std::byte> target{static_cast<std::byte*>(dense.mutable_data_ptr()),
                                    static_cast<std::size_t>(dense.nbytes())};
  if (!target.empty()) {
    io.read(index.files()[tensor.file].file(), tensor.info.offset, target)->wait();
  }
  if (!dense.is_same(buffer)) buffer.copy_(dense);
}

}  // namespace

void save_module(ShardedModel& model, const ::torch::nn::Module& module,
                 const std::string& folder) {
  engine::Engine& engine = model.engine();
  std::vector<engine::SavedTensor> tensors;
  for (int i = 0; i < engine.weights().param_count(); ++i) {
    const plan::ParamSpec& param = engine.weights().param(i);
    const Numel numel = engine.weights().slot_of(i).numel;
    tensors.push_back({{param.name, param.dtype, param.shape}, {{i, Numel(), numel}}});
  }
  const std::size_t params = tensors.size();
  const auto buffers = module.named_buffers();
  for (const auto& buffer : buffers) {
    const at::Tensor& values = buffer.value();
    tensors.push_back(
        {{buffer.key(), from_scalar_type(values.scalar_type()), values.sizes().vec()}, {}});
  }
  io::ThreadEngine io;
  engine::WeightSaver saver(engine, folder, std::move(tensors), io);
  saver.write_pieces();
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const at::Tensor dense = buffers[i].value().contiguous();
    saver.write(params + i, tensor_bytes(dense));
  }
  saver.finish();
}

void load_module(ShardedModel& model, const ::torch::nn::Module& module, const std::string& path) {
  const at::NoGradGuard no_grad;
  engine::Engine& engine = model.engine();
  comm::Collectives& collectives = engine.collectives();
  const auto buffers = module.named_buffers();
  std::optional<LoadPlan> plan;
  engine::agree_after(collectives, fmt::format("opening the checkpoint '{}'", path), [&] {
    plan.emplace(path);
    plan->map.emplace(engine::whole_tensors(engine.weights().params()), plan->index.tensors(),
                      path);
    for (const auto& buffer : buffers) check_buffer(plan->index, buffer.key(), buffer.value());
  });
  std::vector<int> params(static_cast<std::size_t>(engine.weights().param_count()));
  std::iota(params.begin(), params.end(), 0);
  io::ThreadEngine io(reading_options(model.threads()));
  const checkpoint::ReadWay way =
      checkpoint::read_way_from(model.config().strata.init_read).value();
  engine::load_weights_together(engine,
                                {plan->index.open_files(), *plan->map, params, io, {}, way});
  engine::agree_after(collectives, fmt::format("loading '{}'", path), [&] {
    for (const auto& buffer : buffers) read_buffer(plan->index, buffer.key(), buffer.value(), io);
  });
  engine.weights_changed();
}

}  // namespace strata::torch

#include "strata/torch/cpp/module_checkpoint.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <numeric>

#include "strata/base/error.h"
#include "strata/checkpoint/folder.h"
#include "strata/engine/checkpoint/training_loader.h"
#include "strata/engine/checkpoint/training_saver.h"
#include "strata/engine/checkpoint/weight_loader.h"
#include "strata/engine/checkpoint/weight_saver.h"
#include "strata/engine/unit/agreement.h"
#include "strata/io/thread_engine.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/base/tensors.h"

namespace strata::torch {
namespace {

using Json = nlohmann::json;
using format::TensorRole;

constexpr std::string_view kLoadingTrainer = "loading the checkpoint";

void check_buffer(const format::CheckpointIndex& index, const std::string& name,
                  const at::Tensor& buffer) {
  const format::CheckpointTensor* tensor = index.find(name);
  if (tensor == nullptr)
    throw FormatError("{}: the module's buffer '{}' is missing", index.path(), name);
  const DType dtype = from_scalar_type(buffer.scalar_type());
  if (tensor->info.shape == buffer.sizes().vec() && tensor->info.dtype == dtype) return;
  throw FormatError(
      "{}: the buffer '{}' must have the module's dtype and shape, {} [{}]; found {} [{}]",
      index.path(), name, name_of(dtype), fmt::join(buffer.sizes(), ", "),
      name_of(tensor->info.dtype), fmt::join(tensor->info.shape, ", "));
}

// Fills the buffer by `read`, which gets as many bytes on the host.
template <typename Read>
void fill(at::Tensor buffer, Read&& read) {
  const at::Tensor dense =
      at::empty(buffer.sizes(), at::TensorOptions().dtype(buffer.scalar_type()));
  read(mutable_bytes(dense));
  buffer.copy_(dense);
}

Json json_of(const TrainerState& state) {
  Json groups = Json::array();
  for (const engine::GroupScalars& group : state.groups)
    groups.push_back({{"lr", group.lr},
                      {"betas", {group.beta1, group.beta2}},
                      {"eps", group.eps},
                      {"weight_decay", group.weight_decay}});
  Json json = {{"optimizer", {{"class", "Adam"}, {"param_groups", std::move(groups)}}},
               {"scheduler", nullptr},
               {"client_state", Json::object()}};
  if (state.scheduler)
    json["scheduler"] = {{"class", "ScheduledLR"},
                         {"state", {{"last_batch_iteration", state.scheduler->last_iteration()}}}};
  return json;
}

void load_buffers(const engine::TrainingCheckpoint& checkpoint, const ::torch::nn::Module& module,
                  io::IoEngine& io) {
  const at::NoGradGuard no_grad;
  for (const auto& buffer : module.named_buffers()) {
    const auto tensor = checkpoint.find(TensorRole::kBuffer, buffer.key());
    if (!tensor) continue;
    fill(buffer.value(), [&](std::span<std::byte> target) {
      const Bytes bytes = engine::whole_bytes(checkpoint, *tensor);
      if (bytes != Bytes(target.size()))
        throw FormatError("{}: the buffer '{}' has {} bytes, the module's {}", checkpoint.path(),
                          buffer.key(), bytes.value, target.size());
      engine::read_whole(checkpoint, *tensor, io, target);
    });
  }
}

void restore(ShardedModel& model, TrainerState state,
             const engine::TrainingCheckpoint& checkpoint) {
  const std::string& training = checkpoint.manifest().training;
  engine::restore_progress(training, model.control(), checkpoint.path());
  engine::restore_optimizer_steps(training, model.engine(), checkpoint.path());
  try {
    const Json json = Json::parse(training);
    const Json optimizer = json.value("optimizer", Json());
    if (optimizer.is_object()) {
      const Json& groups = optimizer.at("param_groups");
      if (groups.size() != state.groups.size())
        throw UsageError(
            "the trainer has {} param groups, the checkpoint's had {}; make them alike: path={}",
            state.groups.size(), groups.size(), checkpoint.path());
      for (std::size_t i = 0; i < groups.size(); ++i) {
        const Json& group = groups[i];
        engine::GroupScalars& scalars = state.groups[i];
        scalars.lr = group.at("lr");
        scalars.eps = group.value("eps", scalars.eps);
        scalars.weight_decay = group.value("weight_decay", scalars.weight_decay);
        if (!group.contains("betas")) continue;
        const Json& list = group.at("betas");
        const Json& betas = list.is_object() ? list.at("items") : list;  // a tuple of Python's
        scalars.beta1 = betas.at(0);
        scalars.beta2 = betas.at(1);
      }
    }
    const Json scheduler = json.value("scheduler", Json());
    if (state.scheduler && scheduler.is_object() &&
        scheduler.at("state").contains("last_batch_iteration")) {
      state.scheduler->set_last_iteration(scheduler.at("state").at("last_batch_iteration"));
    }
  } catch (const Json::exception& error) {
    throw FormatError("the training state of a checkpoint is not as Strata writes it: {}: path={}",
                      error.what(), checkpoint.path());
  }
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
    saver.write(params + i, const_bytes(dense));
  }
  saver.finish();
}

void load_module(ShardedModel& model, const ::torch::nn::Module& module, const std::string& path) {
  const at::NoGradGuard no_grad;
  engine::Engine& engine = model.engine();
  comm::Collectives& collectives = engine.collectives();
  const auto buffers = module.named_buffers();
  // Everything that the load needs is made before it changes a value.
  std::optional<format::CheckpointIndex> index;
  std::optional<format::WeightMap> map;
  engine::agree_after(collectives, fmt::format("opening the checkpoint '{}'", path), [&] {
    index.emplace(path);
    map.emplace(engine::whole_tensors(engine.weights().params()), index->tensors(), path);
    for (const auto& buffer : buffers) check_buffer(*index, buffer.key(), buffer.value());
  });
  std::vector<int> params(static_cast<std::size_t>(engine.weights().param_count()));
  std::iota(params.begin(), params.end(), 0);
  io::ThreadEngine io(reading_options(model.threads()));
  engine::load_weights_together(
      engine, {index->open_files(), *map, params, io, {}, model.config().strata.init_read});
  engine::agree_after(collectives, fmt::format("loading '{}'", path), [&] {
    for (const auto& buffer : buffers) {
      const format::CheckpointTensor& tensor = *index->find(buffer.key());
      fill(buffer.value(), [&](std::span<std::byte> target) {
        if (target.empty()) return;
        io.read(index->files()[tensor.file].file(), tensor.info.offset, target)->wait();
      });
    }
  });
  engine.weights_changed();
}

void save_training_of(ShardedModel& model, const ::torch::nn::Module& module, TrainerState state,
                      const std::string& folder, std::string tag) {
  engine::Engine& engine = model.engine();
  engine.finish_step();
  if (tag.empty()) tag = fmt::format("global_step{}", model.control().global_steps());
  engine::SaveRequest request;
  request.folder = folder;
  request.tag = std::move(tag);
  request.training = engine::with_progress(json_of(state).dump(), engine, model.control());
  request.publish.keep = model.config().keep_checkpoints;
  std::vector<at::Tensor> dense;  // until all is written
  for (const auto& buffer : module.named_buffers()) {
    dense.push_back(buffer.value().detach().to(at::kCPU).contiguous());
    const at::Tensor& values = dense.back();
    request.content.tensors.push_back({{buffer.key(),
                                        TensorRole::kBuffer,
                                        values.sizes().vec(),
                                        from_scalar_type(values.scalar_type()),
                                        false,
                                        {}},
                                       const_bytes(values),
                                       0});
  }
  io::ThreadEngine io;
  io::FolderCalls calls;
  engine::save_training(engine, request, io, calls);
}

std::optional<std::string> load_training_of(ShardedModel& model, const ::torch::nn::Module& module,
                                            TrainerState state, const std::string& folder,
                                            std::string tag) {
  engine::Engine& engine = model.engine();
  comm::Collectives& collectives = engine.collectives();
  std::string found;
  engine::agree_after(collectives, kLoadingTrainer, [&] {
    if (tag.empty()) tag = checkpoint::latest_tag(folder).value_or("");
    if (tag.empty()) return;
    const auto path = checkpoint::find_checkpoint(folder, tag);
    if (!path) throw IoError("there is no whole checkpoint '{}' in '{}'", tag, folder);
    found = *path;
  });
  found = collectives.all_gather_text(found).front();
  if (found.empty()) return std::nullopt;
  const engine::TrainingCheckpoint checkpoint = engine::open_training(collectives, found);
  io::ThreadEngine io(reading_options(model.threads()));
  engine::LoadRequest request;
  for (const auto& buffer : module.named_buffers())
    request.buffers.push_back({buffer.key(), buffer.value().sizes().vec()});
  engine::load_training(engine, checkpoint, request, io);
  try {
    engine::agree_after(collectives, kLoadingTrainer, [&] {
      load_buffers(checkpoint, module, io);
      restore(model, state, checkpoint);
    });
  } catch (const std::exception& error) {
    engine.loading_failed(error.what());
    throw;
  }
  return found;
}

}  // namespace strata::torch

#include "strata/torch/cpp/module_training.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "strata/base/error.h"
#include "strata/checkpoint/folder.h"
#include "strata/engine/checkpoint/training_loader.h"
#include "strata/engine/checkpoint/training_saver.h"
#include "strata/engine/unit/agreement.h"
#include "strata/io/thread_engine.h"
#include "strata/torch/base/dtype.h"
#include "strata/torch/base/host_threads.h"

namespace strata::torch {
namespace {

using Json = nlohmann::json;
using format::TensorRole;

constexpr std::string_view kLoadingTrainer = "loading the checkpoint";

Json json_of(const TrainerState& state) {
  Json groups = Json::array();
  for (const engine::GroupScalars& group : state.groups) {
    groups.push_back({{"lr", group.lr},
                      {"betas", {group.beta1, group.beta2}},
                      {"eps", group.eps},
                      {"weight_decay", group.weight_decay}});
  }
  Json json = {{"optimizer", {{"class", "Adam"}, {"param_groups", std::move(groups)}}},
               {"scheduler", nullptr},
               {"client_state", Json::object()}};
  if (state.scheduler) {
    json["scheduler"] = {{"class", "ScheduledLR"},
                         {"state", {{"last_batch_iteration", state.scheduler->last_iteration()}}}};
  }
  return json;
}

// The items of a tuple that Python wrote, or of a list.
const Json& items_of(const Json& list) {
  return list.is_object() ? list.at("items") : list;
}

void restore(const Json& json, TrainerState state, const std::string& path) {
  const Json optimizer = json.value("optimizer", Json());
  if (optimizer.is_object()) {
    const Json& groups = optimizer.at("param_groups");
    if (groups.size() != state.groups.size()) {
      throw UsageError(fmt::format(
          "the trainer has {} param groups, the checkpoint's had {}; make them alike: path={}",
          state.groups.size(), groups.size(), path));
    }
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const Json& group = groups[i];
      engine::GroupScalars& scalars = state.groups[i];
      scalars.lr = group.at("lr");
      scalars.eps = group.value("eps", scalars.eps);
      scalars.weight_decay = group.value("weight_decay", scalars.weight_decay);
      if (!group.contains("betas")) continue;
      const Json& betas = items_of(group.at("betas"));
      scalars.beta1 = betas.at(0);
      scalars.beta2 = betas.at(1);
    }
  }
  const Json scheduler = json.value("scheduler", Json());
  if (state.scheduler && scheduler.is_object() &&
      scheduler.at("state").contains("last_batch_iteration")) {
    state.scheduler->set_last_iteration(scheduler.at("state").at("last_batch_iteration"));
  }
}

void load_buffers(const engine::TrainingCheckpoint& checkpoint, const ::torch::nn::Module& module,
                  io::IoEngine& io) {
  const at::NoGradGuard no_grad;
  for (const auto& buffer : module.named_buffers()) {
    const auto tensor = checkpoint.find(TensorRole::kBuffer, buffer.key());
    if (!tensor) continue;
    at::Tensor values = buffer.value();
    at::Tensor dense = at::empty(values.sizes(), at::TensorOptions().dtype(values.scalar_type()));
    const Bytes bytes = engine::whole_bytes(checkpoint, *tensor);
    if (bytes != Bytes(static_cast<std::int64_t>(dense.nbytes()))) {
      throw FormatError(fmt::format("{}: the buffer '{}' has {} bytes, the module's {}",
                                    checkpoint.path(), buffer.key(), bytes.value, dense.nbytes()));
    }
    engine::read_whole(checkpoint, *tensor, io,
                       {static_cast<std::byte*>(dense.mutable_data_ptr()), bytes.size()});
    values.copy_(dense);
  }
}

void restore_all(ShardedModel& model, TrainerState state,
                 const engine::TrainingCheckpoint& checkpoint) {
  const std::string& training = checkpoint.manifest().training;
  engine::restore_progress(training, model.control(), checkpoint.path());
  engine::restore_optimizer_steps(training, model.engine(), checkpoint.path());
  try {
    restore(Json::parse(training), std::move(state), checkpoint.path());
  } catch (const Json::exception& error) {
    throw FormatError(
        fmt::format("the training state of a checkpoint is not as Strata writes it: {}: path={}",
                    error.what(), checkpoint.path()));
  }
}

}  // namespace

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
                                       {static_cast<const std::byte*>(values.const_data_ptr()),
                                        static_cast<std::size_t>(values.nbytes())},
                                       0});
  }
  io::ThreadEngine io;
  io::KernelFolderCalls calls;
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
    if (!path) {
      throw IoError(fmt::format("there is no whole checkpoint '{}' in '{}'", tag, folder));
    }
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
      restore_all(model, std::move(state), checkpoint);
    });
  } catch (const std::exception& error) {
    engine.loading_failed(error.what());
    throw;
  }
  return found;
}

}  // namespace strata::torch

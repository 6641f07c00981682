// A small sharded model for tests of loading and saving: uneven parameters in two units, ranks as
// threads, values that differ by position.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "strata/comm/host/host_collectives.h"
#include "strata/device/cpu_device.h"
#include "strata/engine/checkpoint/shard_states.h"
#include "strata/engine/engine.h"
#include "strata/format/manifest.h"
#include "strata/format/sharded_writer.h"
#include "strata/format/weight_map.h"
#include "strata/io/thread_engine.h"
#include "strata/offload/make_store.h"

namespace strata::testing {

// Ignores every call: the tests look at the flat buffers themselves.
class NoViews final : public engine::ParameterViews {
 public:
  void attach(int /*unit*/, std::span<std::byte> /*flat*/) override {}
  void detach(int /*unit*/) override {}
};

inline plan::ParamSpec make_param(std::string name, std::vector<std::int64_t> shape, DType dtype) {
  plan::ParamSpec param;
  param.name = std::move(name);
  param.shape = std::move(shape);
  param.dtype = dtype;
  return param;
}

// Sizes that no world size divides, an empty one, a scalar, and one that fills many ring buffers.
inline std::vector<plan::ParamSpec> uneven_params(DType dtype) {
  return {make_param("a", {17, 3}, dtype), make_param("empty", {0, 4}, dtype),
          make_param("scalar", {}, dtype), make_param("big", {777, 13}, dtype),
          make_param("last", {5}, dtype)};
}

inline plan::ModelPlan two_units(DType dtype) {
  plan::ModelPlan plan;
  plan.units = {{"first", {0, 1, 2}, dtype, true, false}, {"second", {3, 4}, dtype, true, false}};
  plan.unit_of_param = {0, 0, 0, 1, 1};
  return plan;
}

// One rank's engine over uneven_params.
struct RankModel {
  RankModel(std::shared_ptr<comm::Collectives> ranks, DType dtype, int stage)
      : collectives(std::move(ranks)),
        device(std::make_shared<device::CpuDevice>()),
        params(uneven_params(dtype)),
        plan(two_units(dtype)) {
    engine::EngineOptions options;
    options.stage = stage;
    model = std::make_unique<engine::Engine>(
        params, plan, options, engine::UpdateRule::kNone, "settings", collectives, device,
        engine::Stores{offload::make_memory_store(memory::Tier::kDevice, *device), nullptr}, views);
  }

  // The whole bytes of a parameter, gathered. Collective where gathers are.
  std::vector<std::byte> values(int param) {
    engine::Weights& weights = model->weights();
    const engine::Unit& unit = weights.unit_of(param);
    model->gatherer().acquire(unit.id);
    const plan::Slot& slot = weights.slot_of(param);
    const auto flat =
        model->gatherer().flat(unit.id).subspan(bytes_of(slot.offset, unit.layout.dtype()).size(),
                                                bytes_of(slot.numel, unit.layout.dtype()).size());
    std::vector<std::byte> copy(flat.begin(), flat.end());
    model->gatherer().release(unit.id);
    return copy;
  }

  NoViews views;
  std::shared_ptr<comm::Collectives> collectives;
  std::shared_ptr<device::CpuDevice> device;
  std::vector<plan::ParamSpec> params;
  plan::ModelPlan plan;
  std::unique_ptr<engine::Engine> model;
};

// fp32 masters of this rank's shard.
inline std::vector<float> masters_of(engine::Engine& engine, int unit) {
  const Numel numel = engine.weights().units()[static_cast<std::size_t>(unit)].layout.shard();
  std::vector<float> masters(numel.size());
  engine::ShardStates states(engine);
  states.enqueue_read(unit, format::kValue, Numel(), numel,
                      std::as_writable_bytes(std::span(masters)));
  states.settle();
  return masters;
}

// The index of every parameter of the engine.
inline std::vector<int> all_params(const RankModel& rank) {
  std::vector<int> params;
  for (int p = 0; p < static_cast<int>(rank.params.size()); ++p) params.push_back(p);
  return params;
}

// Runs `body(rank's collectives)` on every rank; "" or "threw: <message>" by rank.
inline std::vector<std::string> on_ranks(
    int world, const std::function<void(std::shared_ptr<comm::Collectives>)>& body) {
  comm::LocalGroup group(world);
  std::vector<std::string> outcomes(static_cast<std::size_t>(world));
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      const std::shared_ptr<comm::Collectives> mine = group.rank(r);
      try {
        body(mine);
      } catch (const std::exception& error) {
        outcomes[static_cast<std::size_t>(r)] = std::string("threw: ") + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

// Element i of parameter p, exact in every floating dtype.
inline float value_at(std::size_t param, std::int64_t i) {
  return static_cast<float>((i * 7 + static_cast<std::int64_t>(param) * 31) % 251) - 100.0F;
}

// The parameter's values as bytes of a dtype.
inline std::vector<std::byte> expected_bytes(std::size_t param, Numel numel, DType dtype) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < numel.value; ++i) values.push_back(value_at(param, i));
  std::vector<std::byte> bytes(bytes_of(numel, dtype).size());
  device::CpuDevice device;
  const auto stream = device.create_stream();
  const auto* source = reinterpret_cast<const std::byte*>(values.data());
  if (dtype == DType::kFloat32) {
    std::copy(source, source + bytes.size(), bytes.begin());
  } else if (numel.value > 0) {
    device.cast(bytes.data(), dtype, source, DType::kFloat32, numel, *stream);
  }
  return bytes;
}

// Writes uneven_params with those values; the path ends in model.safetensors.
inline void write_checkpoint(const std::string& path, DType file_dtype) {
  io::ThreadEngine io;
  std::vector<format::TensorSpec> specs;
  for (const plan::ParamSpec& param : uneven_params(file_dtype)) {
    specs.push_back({param.name, file_dtype, param.shape});
  }
  format::ShardedWriter writer(std::filesystem::path(path).parent_path(), specs, io);
  const auto params = uneven_params(file_dtype);
  for (std::size_t p = 0; p < params.size(); ++p) {
    const std::vector<std::byte> bytes = expected_bytes(p, params[p].numel(), file_dtype);
    if (!bytes.empty()) writer.write(p, Bytes(), bytes)->wait();
  }
  writer.finish();
}

}  // namespace strata::testing

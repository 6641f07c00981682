// A rank of a small model under our AdamW whose masters and moments can be set and looked at bit by
// bit: element i of a parameter has a value of its own for each seed and kind.
#pragma once

#include <bit>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint_model.h"
#include "strata/engine/checkpoint/shard_states.h"
#include "strata/format/manifest.h"

namespace strata::testing {

// Bits of a finite fp32 number, most of them not representable in 16 bits.
inline float state_at(unsigned seed, std::string_view kind, int param, std::int64_t i) {
  std::uint32_t bits = seed * 2654435761U + static_cast<std::uint32_t>(param) * 40503U;
  bits += static_cast<std::uint32_t>(kind.size()) * 7919U + static_cast<std::uint32_t>(i);
  bits = (bits ^ (bits >> 15U)) * 2246822519U;
  bits ^= bits >> 13U;
  return std::bit_cast<float>((bits & 0x807FFFFFU) | 0x3F000000U);
}

struct TrainedRank {
  TrainedRank(std::shared_ptr<comm::Collectives> ranks, DType the_dtype, int stage,
              const std::string& prefix = "",
              std::shared_ptr<device::CpuDevice> the_device = std::make_shared<device::CpuDevice>())
      : collectives(std::move(ranks)), device(std::move(the_device)), dtype(the_dtype) {
    auto params = uneven_params(dtype);
    for (plan::ParamSpec& param : params) param.name = prefix + param.name;
    engine::EngineOptions options;
    options.stage = stage;
    engine = std::make_unique<engine::Engine>(
        params, two_units(dtype), options, engine::UpdateRule::kAdamW, "settings", collectives,
        device, engine::Stores{offload::make_memory_store(memory::Tier::kDevice, *device), nullptr},
        views);
  }

  // Collective.
  void set_states(unsigned seed) {
    engine->prepare();
    engine->gatherer().invalidate(engine::Changed::kAll);
    collectives->barrier();
    engine::ShardStates states(*engine);
    for (int p = 0; p < engine->weights().param_count(); ++p) {
      const Numel numel = engine->weights().param(p).numel();
      for (const std::string_view kind : kinds()) {
        std::vector<float> values;
        for (std::int64_t i = 0; i < numel.value; ++i) values.push_back(state_at(seed, kind, p, i));
        states.enqueue_store(p, kind, Numel(), numel,
                             reinterpret_cast<const std::byte*>(values.data()), DType::kFloat32);
      }
    }
    states.settle();
    engine->weights_changed();
  }

  std::string wrong_states(unsigned seed) { return wrong(seed, kinds()); }
  std::string wrong_values(unsigned seed) { return wrong(seed, {format::kValue}); }
  std::string wrong_moments(unsigned seed) {
    return wrong(seed, {engine::kExpAvg, engine::kExpAvgSq});
  }

  NoViews views;
  std::shared_ptr<comm::Collectives> collectives;
  std::shared_ptr<device::CpuDevice> device;
  DType dtype;
  std::unique_ptr<engine::Engine> engine;

 private:
  static std::vector<std::string_view> kinds() {
    return {format::kValue, engine::kExpAvg, engine::kExpAvgSq};
  }

  // The first element of this rank's shards that does not have its bits; empty: all have.
  std::string wrong(unsigned seed, const std::vector<std::string_view>& of) {
    engine::ShardStates states(*engine);
    for (const engine::Unit& unit : engine->weights().units()) {
      for (const plan::ShardRange& piece :
           unit.layout.pieces(collectives->shard_position().index)) {
        const int p = unit.layout.slots()[static_cast<std::size_t>(piece.slot)].param;
        const Numel numel = piece.param_end - piece.param_begin;
        for (const std::string_view kind : of) {
          const DType stored = states.dtype_of(unit.id, kind);
          std::vector<std::byte> bytes(bytes_of(numel, stored).size());
          states.enqueue_read(unit.id, kind, piece.shard_offset, numel, bytes);
          states.settle();
          for (std::int64_t i = 0; i < numel.value; ++i) {
            const float expected = state_at(seed, kind, p, piece.param_begin.value + i);
            if (value_of(bytes, stored, i) != static_cast<double>(expected))
              return fmt::format("{} of parameter {}, element {}", kind, p,
                                 piece.param_begin.value + i);
          }
        }
      }
    }
    return "";
  }

  static double value_of(const std::vector<std::byte>& bytes, DType dtype, std::int64_t i) {
    const std::byte* at = bytes.data() + bytes_of(Numel(i), dtype).size();
    if (dtype == DType::kFloat64) {
      double value = 0;
      std::memcpy(&value, at, sizeof value);
      return value;
    }
    STRATA_ASSERT(dtype == DType::kFloat32);
    float value = 0;
    std::memcpy(&value, at, sizeof value);
    return static_cast<double>(value);
  }
};

}  // namespace strata::testing

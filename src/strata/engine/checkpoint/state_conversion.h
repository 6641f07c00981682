// Optimizer states that a checkpoint has in another form than the engine: numbers that become codes
// of 8 bits, or codes and scales that become numbers. They come in pieces. When all that this rank
// owns of a parameter is there, the host converts it, so blocks are converted whole.
// Threads: one at a time. Ownership: borrows engine and states; what it has queued stays until
// settle(). Errors: those of ShardStates.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "strata/engine/checkpoint/shard_states.h"
#include "strata/format/manifest.h"
#include "strata/kernels/elementwise.h"
#include "strata/kernels/states8.h"

namespace strata::engine {

class StateConversion {
 public:
  StateConversion(Engine& engine, ShardStates& states) : engine_(engine), states_(states) {}

  // Numbers [begin, begin + numel) of a parameter's `state` in the checkpoint, or of its scales.
  void add(int param, std::string_view state, bool are_scales, Numel begin, Numel numel,
           const std::byte* source, DType dtype) {
    const auto [first, last] = engine_.weights().owned_range(param);
    const bool encodes = states_.in_8_bits(engine_.weights().unit_of(param).id);
    const Numel first_block(first.value / format::kBlock8);
    const Numel blocks = format::numel_of(format::kScales, last) - first_block;
    const auto [place, is_new] = pending_.try_emplace({param, state});
    Pending& pending = place->second;
    if (is_new) {
      pending.numbers.resize((last - first).size());
      pending.codes.resize(pending.numbers.size());
      pending.scales.resize(blocks.size());
      pending.missing = encodes ? last - first : last - first + blocks;
    }
    const auto fill = [&](auto& target, Numel target_begin, DType target_dtype) {
      const Numel low = std::max(begin, target_begin);
      const Numel high = std::min(begin + numel, target_begin + Numel(target.size()));
      if (low >= high) return;
      auto* const to = reinterpret_cast<std::byte*>(target.data() + (low - target_begin).size());
      const std::byte* const from = source + bytes_of(low - begin, dtype).size();
      if (dtype == target_dtype)
        std::memcpy(to, from, bytes_of(high - low, dtype).size());
      else
        kernels::cast(to, target_dtype, from, dtype, high - low, nullptr);
      pending.missing = pending.missing - (high - low);
    };
    if (are_scales)
      fill(pending.scales, first_block, DType::kFloat32);
    else if (encodes)
      fill(pending.numbers, first, DType::kFloat32);
    else
      fill(pending.codes, first, DType::kUInt8);
    if (pending.missing > Numel()) return;
    queued_.push_back(std::move(pending));
    pending_.erase(place);
    store(param, state, first, first_block, encodes, queued_.back());
  }
  // Frees what has been stored; waits for the device where there is some.
  void settle() {
    if (!queued_.empty()) states_.settle();
    queued_.clear();
  }

 private:
  struct Pending {
    std::vector<float> numbers;
    std::vector<std::uint8_t> codes;
    std::vector<float> scales;
    Numel missing;  // of what comes from the checkpoint
  };

  void store(int param, std::string_view state, Numel first, Numel first_block, bool encodes,
             Pending& all) {
    const bool second = state == kExpAvgSq;
    const kernels::Map8& map = second ? kernels::unsigned_map8() : kernels::signed_map8();
    const auto put = [&](std::string_view kind, Numel begin, const auto& values, DType dtype) {
      states_.enqueue_store(param, kind, begin, Numel(values.size()),
                            reinterpret_cast<const std::byte*>(values.data()), dtype);
    };
    if (encodes) {
      kernels::encode_again(map, all.numbers, {all.codes.data(), all.scales.data()},
                            second && engine_.options().keeps_positive);
      put(state, first, all.codes, DType::kUInt8);
      put(ShardStates::scales_of(state), first_block, all.scales, DType::kFloat32);
      return;
    }
    for (std::size_t i = 0; i < all.numbers.size(); ++i) {
      const std::size_t block = (first.size() + i) / kernels::kBlock8 - first_block.size();
      all.numbers[i] = map.values[all.codes[i]] * all.scales[block];
    }
    put(state, first, all.numbers, DType::kFloat32);
  }

  Engine& engine_;
  ShardStates& states_;
  std::map<std::pair<int, std::string_view>, Pending> pending_;
  std::vector<Pending> queued_;
};

}  // namespace strata::engine

#include "strata/engine/checkpoint/weight_replay.h"

#include <algorithm>

#include "strata/checkpoint/ring.h"
#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

constexpr int kPieces = 2;

}  // namespace

void replay_weights(Engine& engine, std::span<const ParamRecipe> recipes, Bytes piece,
                    ThreadPool& threads) {
  engine.state_offload().require_all("replaying constructors");
  agree_after(engine.collectives(), "replaying constructors", [&] {
    Weights& weights = engine.weights();
    checkpoint::TransferRing ring({kPieces, std::max(piece, 16_B)}, engine.device());
    for (const ParamRecipe& each : recipes) {
      const bool whole = weights.unit_of(each.param).whole;
      const Numel all = weights.slot_of(each.param).numel;
      const auto [begin, end] = whole ? std::pair(Numel(), all) : weights.owned_range(each.param);
      const Numel most(std::max<std::int64_t>(1, ring.buffer_bytes() / size_of(each.dtype)));
      for (Numel at = begin; at < end; at += most) {
        const Numel count = std::min(most, end - at);
        const std::size_t turn = ring.next();
        std::byte* const values = ring.buffer(turn).data();
        checkpoint::StreamUse use(ring, turn, &engine.device().compute_stream());
        kernels::replay(each.recipe, at, count, values, each.dtype, &threads);
        weights.enqueue_store_everywhere(each.param, at, count, values, each.dtype);
        use.end();
      }
    }
    engine.device().compute_stream().synchronize();
  });
}

}  // namespace strata::engine

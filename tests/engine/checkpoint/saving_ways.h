// Both ways of saving a checkpoint, for tests that both must pass.
#pragma once

#include <memory>
#include <string>

#include "engine/checkpoint/training_ranks.h"
#include "strata/engine/checkpoint/training_saver.h"

namespace strata::testing {

enum class SavingWay { kAtOnce, kBesideTraining };

inline std::string name_of(const ::testing::TestParamInfo<SavingWay>& way) {
  return way.param == SavingWay::kAtOnce ? "AtOnce" : "BesideTraining";
}

// Collective. Returns when the checkpoint stands.
inline void save_by(SavingWay way, TrainedRank& rank, const engine::SaveRequest& request,
                    const std::shared_ptr<io::IoEngine>& io,
                    const std::shared_ptr<io::FolderCalls>& calls) {
  if (way == SavingWay::kAtOnce) {
    engine::save_training(*rank.engine, request, *io, *calls, {3, 1_MiB});
    return;
  }
  engine::AsyncSaver saver(*rank.engine, io, calls);
  saver.start(request);
  saver.wait();
}

}  // namespace strata::testing

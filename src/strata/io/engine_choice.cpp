#include "strata/io/engine_choice.h"

#include "strata/base/error.h"
#include "strata/io/kernel_ring.h"
#include "strata/io/thread_engine.h"

namespace strata::io {

std::optional<EngineKind> engine_kind_from(std::string_view name) {
  if (name == "auto") return EngineKind::kAuto;
  if (name == "io_uring") return EngineKind::kUring;
  if (name == "threads") return EngineKind::kThreads;
  return std::nullopt;
}

ChosenEngine make_io_engine(const EngineOptions& options) {
  return make_io_engine(options, [](int depth) { return std::make_unique<KernelRing>(depth); });
}

ChosenEngine make_io_engine(const EngineOptions& options, const RingMaker& make_ring) {
  ChosenEngine chosen;
  if (options.kind != EngineKind::kThreads) {
    const UringEngineOptions uring{.piece = options.piece, .depth = options.depth};
    try {
      chosen.engine = std::make_unique<UringEngine>(uring, make_ring);
      return chosen;
    } catch (const IoError& error) {
      if (options.kind == EngineKind::kUring) throw;
      chosen.refused = error.what();
    }
  }
  chosen.engine = std::make_unique<ThreadEngine>(
      ThreadEngineOptions{.threads = options.threads, .piece = options.piece});
  return chosen;
}

}  // namespace strata::io

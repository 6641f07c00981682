// Makes the IoEngine that the system allows: io_uring, or threads where the kernel refuses it, as
// the seccomp profiles of many containers do. Threads: safe everywhere. Errors: UsageError for
// impossible options; a refusal is no error.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "strata/io/io_engine.h"
#include "strata/io/uring_engine.h"

namespace strata::io {

enum class EngineKind { kAuto, kUring, kThreads };

// "auto", "io_uring", "threads"; absent for any other name.
std::optional<EngineKind> engine_kind_from(std::string_view name);

struct EngineOptions {
  EngineKind kind = EngineKind::kAuto;
  Bytes piece = 1_MiB;  // of one request
  int depth = 32;       // requests under way, of io_uring
  int threads = 4;      // requests under way, of threads
};

struct ChosenEngine {
  std::unique_ptr<IoEngine> engine;
  // The reason for an engine without io_uring, to be logged once; empty: it has io_uring, or
  // threads were asked for.
  std::string refused;
};

// IoError if io_uring was asked for by name and the system refuses it.
ChosenEngine make_io_engine(const EngineOptions& options = {});
// With a RingMaker that replaces the kernel's ring.
ChosenEngine make_io_engine(const EngineOptions& options, const RingMaker& make_ring);

}  // namespace strata::io

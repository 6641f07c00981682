#include "strata/format/running_checksum.h"

#include <xxhash.h>

#include "strata/base/error.h"

namespace strata::format {
namespace {

struct Free {
  void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
};

}  // namespace

struct RunningChecksum::State {
  std::unique_ptr<XXH3_state_t, Free> xxh3{XXH3_createState()};
};

RunningChecksum::RunningChecksum() : state_(std::make_unique<State>()) {
  STRATA_ASSERT(state_->xxh3 != nullptr);
  restart();
}

RunningChecksum::~RunningChecksum() = default;

void RunningChecksum::restart() {
  XXH3_64bits_reset(state_->xxh3.get());
}

void RunningChecksum::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(state_->xxh3.get(), bytes.data(), bytes.size());
}

std::uint64_t RunningChecksum::value() const {
  return XXH3_64bits_digest(state_->xxh3.get());
}

}  // namespace strata::format

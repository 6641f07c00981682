#include "strata/comm/peer/peer_flags.h"

#include <fmt/core.h>

#include <string_view>

namespace strata::comm {
namespace {

std::string_view text_of(PeerFlags::Kind kind) {
  switch (kind) {
    case PeerFlags::Kind::kWritten:
      return "its part of a reduction";
    case PeerFlags::Kind::kRead:
      return "it to read this rank's part of a reduction";
    case PeerFlags::Kind::kBarrier:
    case PeerFlags::Kind::kGathered:
      return "it at a barrier";
    case PeerFlags::Kind::kGiven:
      return "its values of an exchange";
    case PeerFlags::Kind::kRounds:
      return "it to read this rank's new weights";
  }
  return "it";
}

}  // namespace

void FlagWatch::expect(PeerFlags::Kind kind, int peer, const device::Flag& flag,
                       std::uint32_t value) {
  const std::lock_guard lock(mutex_);
  const auto [place, is_new] = waits_.try_emplace(&flag, Wait{kind, peer, value, value});
  Wait& wait = place->second;
  wait.newest = value;
  if (is_new || !device::reached(flag.load(), wait.oldest)) return;
  wait.oldest = value;
  wait.looks = 0;
}

std::optional<LatePeer> FlagWatch::look() {
  const std::lock_guard lock(mutex_);
  for (auto& [flag, wait] : waits_) {
    const std::uint32_t count = flag->load();
    if (device::reached(count, wait.oldest)) {
      wait.oldest = wait.newest;
      wait.looks = 0;
    }
    if (device::reached(count, wait.oldest) || ++wait.looks <= kLooks) continue;
    return LatePeer{
        wait.peer,
        fmt::format("lives but does not come: this rank's streams have waited for {} longer than "
                    "the timeout of {} ms; look there for a process that is stopped or hangs",
                    text_of(wait.kind), timeout_.count())};
  }
  return std::nullopt;
}

}  // namespace strata::comm

#include "strata/engine/record/link_speed.h"

#include <algorithm>
#include <memory>
#include <thread>

#include "strata/memory/host_buffer.h"

namespace strata::engine {
namespace {

// As large as what the engine copies at once at most.
constexpr Bytes kSample = 16_MiB;
constexpr int kCopies = 4;

// Not Event::wait(), which would count as a wait of the engine's steps.
void come_to(device::Event& event) {
  while (!event.done()) std::this_thread::yield();
}

}  // namespace

LinkSpeed measure_link(device::Device& device) {
  const auto there = device.allocate_uncharged(kSample);
  if (device.host_accessible(there->bytes().data())) return {};
  memory::HostBuffer host(kSample);
  const auto pinned = device.pin(host.bytes());
  const auto stream = device.create_stream();
  const auto gb_per_s = [&](std::span<std::byte> target, std::span<const std::byte> source) {
    double best = 0.0;
    for (int i = 0; i < kCopies; ++i) {
      const auto begin = stream->record_timed();
      device.copy(target, source, *stream);
      const auto end = stream->record_timed();
      come_to(*begin);
      come_to(*end);
      const double seconds = end->seconds_since(*begin);
      if (seconds > 0.0) best = std::max(best, static_cast<double>(kSample.value) / seconds * 1e-9);
    }
    return best;
  };
  return {.up_gb_per_s = gb_per_s(there->bytes(), host.bytes()),
          .down_gb_per_s = gb_per_s(host.bytes(), there->bytes())};
}

}  // namespace strata::engine

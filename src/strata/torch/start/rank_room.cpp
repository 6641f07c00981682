#include "strata/torch/start/rank_room.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <string>

#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"
#include "strata/memory/available_memory.h"
#include "strata/torch/base/host_threads.h"
#include "strata/torch/base/placement.h"

namespace strata::torch {
namespace {

Bytes values_on(const ModelInput& input, const c10::Device& place) {
  Bytes bytes;
  for (const ModelParameter& parameter : input.parameters) {
    if (parameter.has_own_values() && parameter.variable.device() == place)
      bytes += Bytes(static_cast<std::int64_t>(parameter.variable.nbytes()));
  }
  return bytes;
}

}  // namespace

forecast::Room agreed_room(const ModelInput& input, const engine::Config& config,
                           const ModelRuntime& runtime) {
  if (!config.offload.automatic) return {};
  comm::Collectives& collectives = *runtime.collectives;
  engine::agree_on_text(collectives, "configuration", config.digest());
  release_cached_memory(runtime.place);
  const Bytes device = runtime.device->free_bytes() + values_on(input, runtime.place);
  const Bytes host = memory::available_memory() / ranks_of_host(collectives.world_size());
  forecast::FreeMemory least{device, host, runtime.place.is_cpu()};
  for (const std::string& text :
       collectives.all_gather_text(fmt::format("{} {}", device.value, host.value))) {
    std::istringstream stream(text);
    Bytes on_device;
    Bytes on_host;
    stream >> on_device.value >> on_host.value;
    STRATA_ASSERT(!stream.fail());
    least.device = std::min(*least.device, on_device);
    least.host = std::min(*least.host, on_host);
  }
  return forecast::room_for(config.offload, least);
}

void require_staging_room(const engine::EngineOptions& options, int ranks_of_host,
                          Bytes available) {
  Bytes wanted;
  std::string parts;
  const auto add = [&](const offload::StatePlacement& place, std::string_view section) {
    if (!place.uses(memory::Tier::kNvme)) return;
    wanted += place.budget;
    parts += fmt::format("{}{} of offload_{}", parts.empty() ? "" : ", ", to_string(place.budget),
                         section);
  };
  add(options.states, "optimizer");
  add(options.weights, "param");
  if (wanted <= available / ranks_of_host) return;
  throw OutOfMemoryError(fmt::format(
      "the host has less memory than what drives are to be staged through (buffer_count times "
      "buffer_size, and max_in_cpu); lower one of them: some megabytes suffice. Wanted by each of "
      "{} ranks of this "
      "host: {} ({}); available for each: {}",
      ranks_of_host, to_string(wanted), parts, to_string(available / ranks_of_host)));
}

}  // namespace strata::torch

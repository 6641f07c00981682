#include "strata/torch/rank_environment.h"

#include <chrono>
#include <cstdlib>
#include <optional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "strata/base/error.h"
#include "strata/comm/transports.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/ranks/rank_joining.h"

namespace strata::torch {
namespace {

std::optional<std::string> variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? std::nullopt : std::optional<std::string>(text);
}

std::optional<int> number(const char* name, int lowest, int highest) {
  const std::optional<std::string> text = variable(name);
  if (!text) return std::nullopt;
  const std::optional<int> value = whole_number(*text);
  if (value && *value >= lowest && *value <= highest) return value;
  throw ConfigError("the environment variable {} must be a whole number from {} to {}; found '{}'",
                    name, lowest, highest, *text);
}

int required_number(const char* name, int lowest, int highest) {
  if (const std::optional<int> value = number(name, lowest, highest)) return *value;
  throw ConfigError(
      "WORLD_SIZE is set, so {0} must be, too; found none. Start every rank with its own RANK and "
      "the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT: {0}",
      name);
}

c10::intrusive_ptr<c10d::Store> open_store(const RankEnvironment& environment,
                                           std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = environment.master_port;
  options.isServer = environment.rank == 0 && !environment.launcher_listens;
  options.waitWorkers = false;  // the bootstrap waits, and names absent ranks
  options.timeout = timeout;
  try {
    return c10::make_intrusive<c10d::PrefixStore>(
        fmt::format("strata/attempt-{}", environment.attempt),
        c10::make_intrusive<c10d::TCPStore>(environment.master_address, options));
  } catch (const std::exception& error) {
    throw CommError(
        "rank {} cannot {} {}:{} (MASTER_ADDR, MASTER_PORT), where the ranks find each other: {}",
        environment.rank, options.isServer ? "listen at" : "reach", environment.master_address,
        environment.master_port, error.what());
  }
}

// The C++ face starts no NCCL.
void require_one_transport(const engine::Config& config, c10::Device place) {
  using comm::TransportKind;
  for (const TransportKind kind :
       {config.strata.transports.gather, config.strata.transports.reduce}) {
    if (kind == TransportKind::kAuto || (kind == TransportKind::kPeer && place.is_cuda())) continue;
    throw ConfigError(
        "strata.gather, strata.reduce: they choose between peer and nccl for a model on GPUs, and "
        "a C++ program that wants NCCL for one of them makes both (make_split_collectives) and "
        "passes TrainerOptions::collectives; found '{}' and a model on {}",
        name_of(kind), place.str());
  }
}

}  // namespace

RankEnvironment RankEnvironment::read() {
  RankEnvironment result;
  constexpr int kRanksMax = 1 << 20;
  const std::optional<int> world = number("WORLD_SIZE", 1, kRanksMax);
  if (!world) return result;
  result.world_size = *world;
  result.rank = required_number("RANK", 0, result.world_size - 1);
  if (result.world_size == 1) return result;
  result.master_address = variable("MASTER_ADDR").value_or("127.0.0.1");
  result.master_port = static_cast<std::uint16_t>(required_number("MASTER_PORT", 1, 65535));
  result.launcher_listens = variable("TORCHELASTIC_USE_AGENT_STORE") == "True";
  result.attempt = number("TORCHELASTIC_RESTART_COUNT", 0, kRanksMax).value_or(0);
  return result;
}

std::shared_ptr<comm::Collectives> make_collectives(const RankEnvironment& environment,
                                                    const engine::Config& config,
                                                    c10::Device place) {
  if (environment.world_size == 1) return single_rank(place);
  const comm::TransportSettings& settings = config.strata.transports;
  require_one_transport(config, place);
  const comm::TransportChoice choice =
      choose_inside(settings, {environment.world_size, true}, place.is_cuda());
  if (settings.collectives == comm::CollectivesKind::kLocal ||
      choice.control == comm::TransportChoice::Control::kBackend ||
      (choice.bulk && choice.bulk->has(comm::TransportKind::kNccl))) {
    throw ConfigError(
        "strata.collectives: a C++ program of several processes of one host finds \"shm\" for a "
        "model on the CPU by itself and \"peer\" for one on GPUs, with \"auto\"; for anything else "
        "make the collectives, and pass TrainerOptions::collectives; found {} ranks and a model on "
        "{}",
        environment.world_size, place.str());
  }
  JoiningRank rank;
  rank.rank = environment.rank;
  rank.world_size = environment.world_size;
  rank.place = place;
  rank.on_gpu = place.is_cuda();
  rank.store = open_store(environment, timeout_of(config));
  std::shared_ptr<comm::Collectives> collectives = join_ranks(config, rank).collectives;
  collectives->barrier();  // rank 0's store ends with this function; every rank has read it now
  return collectives;
}

}  // namespace strata::torch

#include "strata/torch/ranks/rank_joining.h"

#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "strata/base/error.h"
#include "strata/comm/host/host_collectives.h"
#include "strata/comm/peer/peer_collectives.h"
#include "strata/engine/unit/unit.h"

namespace strata::torch {
namespace {

using Control = comm::TransportChoice::Control;

constexpr std::string_view kFailed = "failed: ";

// Ranks find each other through a c10d Store (torchrun's, or a TCPStore of one's own).
// CommError names the ranks that did not come within the timeout.
class StoreBootstrap final : public comm::Bootstrap {
 public:
  StoreBootstrap(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                 std::chrono::milliseconds timeout)
      : store_(std::move(store)), rank_(rank), world_size_(world_size), timeout_(timeout) {
    // Every rank makes its bootstraps in the same order, so its own count tells which one this is.
    const std::int64_t count = store_->add(fmt::format("strata/bootstraps/{}", rank_), 1);
    prefix_ = fmt::format("strata/bootstrap/{}", count);
  }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }

  std::vector<std::string> exchange(const std::string& text) override {
    ++round_;
    store_->set(key(rank_), std::vector<std::uint8_t>(text.begin(), text.end()));
    std::vector<std::string> texts;
    std::vector<int> absent;
    for (int r = 0; r < world_size_; ++r) {
      try {
        store_->wait({key(r)}, absent.empty() ? timeout_ : std::chrono::milliseconds(1));
        const std::vector<std::uint8_t> bytes = store_->get(key(r));
        texts.emplace_back(bytes.begin(), bytes.end());
      } catch (const std::exception&) {
        absent.push_back(r);
      }
    }
    if (!absent.empty())
      throw CommError(
          "rank {} waited {} s for the other ranks to start; these did not come: {}. Start every "
          "rank with the same script, or look at their own errors",
          rank_, std::chrono::duration_cast<std::chrono::seconds>(timeout_).count(),
          fmt::join(absent, ", "));
    return texts;
  }

 private:
  std::string key(int rank) const { return fmt::format("{}/{}/{}", prefix_, round_, rank); }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int world_size_;
  std::chrono::milliseconds timeout_;
  std::string prefix_;  // distinguishes the bootstraps of one store
  int round_ = 0;
};

// The facts that each rank publishes about itself, one per line.
enum Line : std::size_t { kHost, kDevice, kGroups, kKinds, kNcclRuns, kLines };
using Lines = std::array<std::string, kLines>;

std::vector<Lines> agree_on_operation(const JoiningRank& rank, std::chrono::milliseconds timeout,
                                      const Lines& mine) {
  StoreBootstrap bootstrap(rank.store, rank.rank, rank.world_size, timeout);
  const std::vector<std::string> texts =
      bootstrap.exchange(fmt::format("{}", fmt::join(mine, "\n")));
  std::vector<Lines> all(texts.size());
  for (std::size_t r = 0; r < texts.size(); ++r) {
    if (texts[r].starts_with(kFailed))
      throw CommError("rank {} failed before the ranks met: {}", r,
                      texts[r].substr(kFailed.size()));
    std::istringstream text(texts[r]);
    for (std::string& line : all[r]) std::getline(text, line);
  }
  return all;
}

// `keys`: the configuration's keys that decide; `what`: the thing that they select.
void require_same(const std::vector<Lines>& ranks, Line line, std::string_view keys,
                  std::string_view what) {
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    if (ranks[r][line] == ranks[0][line]) continue;
    throw ConfigError("{}: every rank must use the same {}; found {} on rank 0 and {} on rank {}",
                      keys, what, ranks[0][line], ranks[r][line], r);
  }
}

void require_own_devices(const std::vector<Lines>& ranks) {
  const auto kind_of = [&](std::size_t r) {
    return ranks[r][kDevice].substr(0, ranks[r][kDevice].find(' '));
  };
  std::map<std::pair<std::string, std::string>, std::size_t> owners;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (kind_of(r) != kind_of(0))
      throw ConfigError(
          "strata.device: all ranks must train on the same kind of device; found rank 0 on {} and "
          "rank {} on {}",
          kind_of(0), r, kind_of(r));
    const auto [owner, own] = owners.emplace(std::pair(ranks[r][kHost], ranks[r][kDevice]), r);
    if (own || kind_of(r) == "cpu" || kind_of(r).empty()) continue;
    throw ConfigError(
        "strata.device: ranks {} and {} are on one GPU; give each its own by LOCAL_RANK or "
        "CUDA_VISIBLE_DEVICES. Found {}",
        owner->second, r, ranks[r][kDevice]);
  }
}

// Only "peer" can join ranks that share a GPU.
bool may_share_devices(const comm::TransportSettings& settings) {
  const std::array named{name_of(settings.collectives), name_of(settings.gather),
                         name_of(settings.reduce)};
  return std::ranges::any_of(named, [](auto name) { return name == "peer"; }) &&
         std::ranges::all_of(named, [](auto name) { return name == "peer" || name == "auto"; });
}

// The result has moved some bytes when this returns.
std::shared_ptr<comm::Collectives> make_nccl(const JoiningRank& me, DeviceGroup group) {
  try {
    std::vector<at::Tensor> zero{
        at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(me.place))};
    group.bulk->get().allreduce(zero)->wait();
    group.device->compute_stream().synchronize();
  } catch (const std::exception& error) {
    std::array<char, 256> host{};
    ::gethostname(host.data(), host.size() - 1);
    throw CommError("rank {} on host {}: NCCL did not start on {}: {}", me.rank, host.data(),
                    me.place.str(), error.what());
  }
  return make_device_collectives(std::move(group));
}

using Choose = comm::TransportChoice (*)(const comm::TransportSettings&, const comm::RankSet&,
                                         bool on_gpus);

// Joins `size` ranks of the world, which `names` tells, by the transports that `choose` returns.
comm::JoinedTransports join_some(const engine::Config& config, const JoiningRank& me,
                                 const std::vector<Lines>& world, comm::RankNames names, int size,
                                 Choose choose, bool nccl_runs) {
  const int rank = (me.rank - names.first) / names.step;
  std::vector<int> ranks;  // as the world numbers them
  for (int r = 0; r < size; ++r) ranks.push_back(names.of(r));
  const std::string& host = engine::nth(world, ranks[0])[kHost];
  const bool one_host =
      std::ranges::all_of(ranks, [&](int r) { return engine::nth(world, r)[kHost] == host; });
  const auto store = c10::make_intrusive<c10d::PrefixStore>(
      fmt::format("ranks-{}-{}-{}", names.first, size, names.step), me.store);
  // An id that is the same on all ranks and never used again.
  const auto new_id = [&] {
    return fmt::format("group-{}", store->add(fmt::format("strata/groups/{}", rank), 1));
  };
  comm::CommOptions options;
  options.timeout = timeout_of(config);
  options.names = names;

  const comm::TransportChoice choice =
      choose(config.strata.transports, {size, one_host}, me.on_gpu);
  if (choice.control == Control::kNone) return {single_rank(me.place, me.waits), std::nullopt};
  std::shared_ptr<comm::Collectives> control;
  if (choice.control == Control::kSharedMemory) {
    StoreBootstrap bootstrap(store, rank, size, options.timeout);
    control = comm::make_shm_collectives(bootstrap, options);
  } else {
    control = make_c10d_collectives(me.new_backend("gloo", ranks), store, new_id(), "gloo", names);
  }
  if (!choice.bulk) return {control, std::nullopt};
  comm::TransportFactories makers;
  makers.peers = [&] {
    return std::shared_ptr(comm::make_peer_collectives(me.make_device(), control, options));
  };
  if (me.new_backend) {
    makers.nccl = [&] {
      return make_nccl(me, {me.place, me.make_device(), control, me.new_backend("nccl", ranks),
                            store, new_id(), "nccl", names});
    };
  }
  makers.nccl_runs = nccl_runs;
  makers.probe = [&](comm::Collectives& collectives) {
    return comm::probe(collectives, *me.make_device(),
                       {config.precision.param_dtype.value_or(DType::kFloat32),
                        config.precision.communication_dtype});
  };
  makers.say = [&](bool warning, const std::string& text) {
    if (rank == 0 && me.say) me.say(warning, text);
  };
  return comm::join_transports(*choice.bulk, makers);
}

}  // namespace

std::chrono::milliseconds timeout_of(const engine::Config& config) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(config.strata.timeout_s * 1000.0));
}

std::string host_identity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  const auto processes = std::filesystem::read_symlink("/proc/self/ns/pid");
  return fmt::format("{} {} {}", boot, processes.string(), ::getuid());
}

comm::JoinedTransports join_ranks(const engine::Config& config, const JoiningRank& me) {
  const comm::TransportSettings& settings = config.strata.transports;
  const comm::ShardGroups groups{config.shard_group_size(me.world_size),
                                 me.world_size / config.shard_group_size(me.world_size)};
  const bool secondary = config.zero.secondary_shards;
  const std::vector<Lines> world =
      agree_on_operation(me, timeout_of(config),
                         {me.host, me.device,
                          fmt::format("{}groups of {}", secondary ? "secondary " : "", groups.size),
                          fmt::format("{}, {} and {}", name_of(settings.collectives),
                                      name_of(settings.gather), name_of(settings.reduce)),
                          me.nccl_runs ? "nccl" : ""});
  require_same(world, kGroups, "zero_optimization.mics_shard_size, zero_hpz_partition_size",
               "shard groups");
  require_same(world, kKinds, "strata.collectives, strata.gather and strata.reduce", "collectives");
  if (!may_share_devices(settings)) require_own_devices(world);

  const bool nccl_runs = groups.count == 1 && std::ranges::all_of(world, [](const Lines& lines) {
                           return !lines[kNcclRuns].empty();
                         });
  comm::JoinedTransports joined = join_some(config, me, world, groups.inside_of(me.rank),
                                            groups.size, &comm::choose_inside, nccl_runs);
  if (settings.joint_gathers && me.world_size > 1 && joined.collectives->traits().one_sided)
    joined.collectives = comm::make_joint_gathers(std::move(joined.collectives), me.make_device());
  if (groups.count == 1) return joined;
  std::shared_ptr<comm::Collectives> replicas =
      join_some(config, me, world, groups.across_of(me.rank), groups.count, &comm::choose_across,
                false)
          .collectives;
  joined.collectives = comm::make_grouped_collectives(
      std::move(joined.collectives), std::move(replicas), me.make_device(), config.slices());
  return joined;
}

void tell_failure(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                  std::string_view reason, std::chrono::milliseconds patience) {
  try {
    StoreBootstrap(store, rank, world_size, patience)
        .exchange(fmt::format("{}{}", kFailed, reason));
  } catch (const CommError&) {
    return;  // no other rank came within `patience`
  }
}

}  // namespace strata::torch

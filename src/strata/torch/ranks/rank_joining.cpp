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
#include "strata/comm/collectives.h"
#include "strata/comm/combined/combined_collectives.h"
#include "strata/comm/host/host_collectives.h"
#include "strata/comm/peer/peer_collectives.h"
#include "strata/torch/base/placement.h"

namespace strata::torch {
namespace {

using comm::TransportKind;
using Control = comm::TransportChoice::Control;

constexpr std::string_view kFailed = "failed: ";

std::chrono::milliseconds timeout_of(const engine::Config& config) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(config.strata.timeout_s * 1000.0));
}

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
    if (!absent.empty()) {
      throw CommError(fmt::format(
          "rank {} waited {} s for the other ranks to start; these did not come: {}. Start every "
          "rank with the same script, or look at their own errors",
          rank_, std::chrono::duration_cast<std::chrono::seconds>(timeout_).count(),
          fmt::join(absent, ", ")));
    }
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
    if (texts[r].starts_with(kFailed)) {
      throw CommError(fmt::format("rank {} failed before the ranks met: {}", r,
                                  texts[r].substr(kFailed.size())));
    }
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
    throw ConfigError(
        fmt::format("{}: every rank must use the same {}; found {} on rank 0 and {} on rank {}",
                    keys, what, ranks[0][line], ranks[r][line], r));
  }
}

void require_own_devices(const std::vector<Lines>& ranks) {
  const auto kind_of = [&](std::size_t r) {
    return ranks[r][kDevice].substr(0, ranks[r][kDevice].find(' '));
  };
  std::map<std::pair<std::string, std::string>, std::size_t> owners;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (kind_of(r) != kind_of(0)) {
      throw ConfigError(
          fmt::format("strata.device: all ranks must train on the same kind of device; found rank "
                      "0 on {} and rank {} on {}",
                      kind_of(0), r, kind_of(r)));
    }
    const auto [owner, own] = owners.emplace(std::pair(ranks[r][kHost], ranks[r][kDevice]), r);
    if (own || kind_of(r) == "cpu" || kind_of(r).empty()) continue;
    throw ConfigError(fmt::format(
        "strata.device: ranks {} and {} are on one GPU; give each its own by LOCAL_RANK "
        "or CUDA_VISIBLE_DEVICES. Found {}",
        owner->second, r, ranks[r][kDevice]));
  }
}

// Only "peer" can join ranks that share a GPU.
bool may_share_devices(const comm::TransportSettings& settings) {
  const std::array named{name_of(settings.collectives), name_of(settings.gather),
                         name_of(settings.reduce)};
  return std::ranges::any_of(named, [](auto name) { return name == "peer"; }) &&
         std::ranges::all_of(named, [](auto name) { return name == "peer" || name == "auto"; });
}

// Ranks of the world that exchange bytes with each other.
class Part {
 public:
  Part(const engine::Config& config, const JoiningRank& me, comm::RankNames names, int size)
      : config_(config), me_(me), size_(size) {
    options_.timeout = timeout_of(config);
    options_.names = names;
    for (int r = 0; r < size; ++r) ranks_.push_back(names.of(r));
    rank_ = (me.rank - names.first) / names.step;
    store_ = c10::make_intrusive<c10d::PrefixStore>(
        fmt::format("ranks-{}-{}-{}", names.first, size, names.step), me.store);
  }

  comm::RankSet set(const std::vector<Lines>& world) const {
    comm::RankSet set{size_, true};
    for (const int r : ranks_) {
      set.one_host = set.one_host && world[static_cast<std::size_t>(r)][kHost] ==
                                         world[static_cast<std::size_t>(ranks_[0])][kHost];
    }
    return set;
  }

  comm::JoinedTransports join(const comm::TransportChoice& choice, bool nccl_runs) {
    if (choice.control == Control::kNone) return {single_rank(me_.place, me_.waits), std::nullopt};
    const std::shared_ptr<comm::Collectives> control = make_control(choice.control);
    if (!choice.bulk) return {control, std::nullopt};
    comm::TransportFactories makers;
    makers.peers = [&] {
      comm::PeerOptions options{options_.timeout, options_.names};
      return std::shared_ptr(
          comm::make_peer_collectives(make_device(me_.place, 1, me_.waits), control, options));
    };
    if (me_.new_backend) makers.nccl = [&] { return make_nccl(control); };
    makers.nccl_runs = nccl_runs;
    makers.probe = [&](comm::Collectives& collectives) {
      return comm::probe(collectives, *make_device(me_.place, 1, me_.waits),
                         {config_.precision.param_dtype.value_or(DType::kFloat32),
                          config_.precision.communication_dtype});
    };
    makers.say = [&](bool warning, const std::string& text) {
      if (rank_ == 0 && me_.say) me_.say(warning, text);
    };
    return comm::join_transports(*choice.bulk, makers);
  }

 private:
  std::shared_ptr<comm::Collectives> make_control(Control control) {
    if (control == Control::kSharedMemory) {
      StoreBootstrap bootstrap(store_, rank_, size_, options_.timeout);
      return comm::make_shm_collectives(bootstrap, options_);
    }
    return make_c10d_collectives(me_.new_backend("gloo", ranks_), store_, new_id(), "gloo",
                                 options_.names);
  }

  // An id that is the same on all ranks and never used again.
  std::string new_id() {
    return fmt::format("group-{}", store_->add(fmt::format("strata/groups/{}", rank_), 1));
  }

  // The result has moved some bytes when this returns.
  std::shared_ptr<comm::Collectives> make_nccl(std::shared_ptr<comm::Collectives> control) {
    DeviceGroup group;
    group.place = me_.place;
    group.device = make_device(me_.place, 1, me_.waits);
    group.control = std::move(control);
    group.bulk = me_.new_backend("nccl", ranks_);
    group.store = store_;
    group.id = new_id();
    group.name = "nccl";
    group.names = options_.names;
    try {
      std::vector<at::Tensor> zero{
          at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(me_.place))};
      group.bulk->get().allreduce(zero)->wait();
      group.device->compute_stream().synchronize();
    } catch (const std::exception& error) {
      std::array<char, 256> host{};
      ::gethostname(host.data(), host.size() - 1);
      throw CommError(fmt::format("rank {} on host {}: NCCL did not start on {}: {}", me_.rank,
                                  host.data(), me_.place.str(), error.what()));
    }
    return make_device_collectives(std::move(group));
  }

  const engine::Config& config_;
  const JoiningRank& me_;
  int size_;
  int rank_;
  comm::CommOptions options_;
  std::vector<int> ranks_;  // as the world numbers them
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

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

  Part inside(config, me, groups.inside_of(me.rank), groups.size);
  const bool nccl_runs = groups.count == 1 && std::ranges::all_of(world, [](const Lines& lines) {
                           return !lines[kNcclRuns].empty();
                         });
  comm::JoinedTransports joined =
      inside.join(choose_inside(settings, inside.set(world), me.on_gpu), nccl_runs);
  if (settings.joint_gathers && me.world_size > 1 && joined.collectives->traits().one_sided) {
    joined.collectives =
        comm::make_joint_gathers(std::move(joined.collectives), make_device(me.place, 1, me.waits));
  }
  if (groups.count == 1) return joined;
  Part across(config, me, groups.across_of(me.rank), groups.count);
  std::shared_ptr<comm::Collectives> replicas =
      across.join(choose_across(settings, across.set(world), me.on_gpu), false).collectives;
  joined.collectives =
      comm::make_grouped_collectives(std::move(joined.collectives), std::move(replicas),
                                     make_device(me.place, 1, me.waits), config.slices());
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

#include "strata/forecast/auto_placement.h"

#include <algorithm>

#include "strata/base/error.h"
#include "strata/engine/config/config.h"

namespace strata::forecast {
namespace {

using memory::Tier;

// Values that go to one tier together: the weights of one unit, or its masters and states.
struct Item {
  std::size_t unit = 0;
  bool states = false;
};

class Search {
 public:
  Search(std::vector<plan::ParamSpec>& params, const plan::ModuleTree& tree,
         const engine::Config& config, const Trainers& trainers, const Room& room)
      : params_(params),
        tree_(tree),
        config_(config),
        trainers_(trainers),
        room_(room),
        units_(plan::plan_units(params, tree, engine::plan_options_from(config)).units) {
    find_items();
  }

  void run() {
    if (!room_.device) return;
    const std::size_t all = items_.size();
    const auto on_device = last_that_fits(0, all, [&](std::size_t count) {
      return forecast({count, all}).total() <= *room_.device;
    });
    if (!on_device) {
      const MemoryForecast least = forecast({0, all});
      throw OutOfMemoryError(
          "strata.placement \"auto\": the device does not suffice with everything that may be "
          "offloaded at stage {} elsewhere; shard more (stage 3, more ranks), lower "
          "strata.max_live_bytes or reduce_bucket_size, or raise strata.device_budget. Wanted on "
          "each device: {} ({}); it may hold {}",
          config_.zero.stage, to_string(least.total()), kinds_on(least, Tier::kDevice),
          to_string(*room_.device));
    }
    if (*on_device == all) return;
    place({*on_device, room_.host ? hosted(*on_device) : all}, params_);
  }

 private:
  // The first items are on the device, those up to the second number on the host.
  struct Cuts {
    std::size_t device = 0;
    std::size_t host = 0;
  };

  // The nearest first.
  void find_items() {
    const bool ours = plan::is_native(trainers_.rule);
    const bool foreign = plan::is_external(trainers_.rule);
    for (std::size_t u = 0; u < units_.size(); ++u) {
      if (config_.offload.places_weights && !foreign && !units_[u].persistent)
        items_.push_back({u, false});
    }
    for (std::size_t u = 0; u < units_.size(); ++u) {
      if (config_.zero.stage >= 1 && ours && units_[u].trainable) items_.push_back({u, true});
    }
  }

  // The largest of [least, most] that fits, if whatever fits does so with less, too. Nothing where
  // the least does not.
  template <typename Fits>
  static std::optional<std::size_t> last_that_fits(std::size_t least, std::size_t most,
                                                   const Fits& fits) {
    if (fits(most)) return most;
    if (least == most || !fits(least)) return std::nullopt;
    while (most - least > 1) {
      const std::size_t middle = least + (most - least) / 2;
      (fits(middle) ? least : most) = middle;
    }
    return least;
  }

  std::size_t hosted(std::size_t on_device) const {
    const auto fits = [&](std::size_t count) {
      return forecast({on_device, count}).total_on(Tier::kHost) <= *room_.host;
    };
    const std::size_t all = items_.size();
    if (config_.offload.optimizer_folders.empty()) {  // and those of weights: no drive
      if (fits(all)) return all;
      refuse_host(forecast({on_device, all}),
                  "there is no nvme_path in offload_optimizer or offload_param, so that the host "
                  "is the last tier: give one, raise strata.host_budget or strata.device_budget, "
                  "or take more ranks");
    }
    const auto found = last_that_fits(on_device, all, fits);
    if (found) return *found;
    refuse_host(
        forecast({on_device, on_device}),
        "even with everything else on the drive, whose staging and the gradients are on the host: "
        "lower buffer_count, raise strata.host_budget or strata.device_budget, or take more ranks");
  }

  void place(const Cuts& cuts, std::vector<plan::ParamSpec>& params) const {
    for (std::size_t i = cuts.device; i < items_.size(); ++i) {
      const Tier tier = i < cuts.host ? Tier::kHost : Tier::kNvme;
      for (const int param : units_[items_[i].unit].params) {
        plan::Placement& to = params[static_cast<std::size_t>(param)].place;
        (items_[i].states ? to.states : to.weights) = tier;
      }
    }
  }

  MemoryForecast forecast(const Cuts& cuts) const {
    std::vector<plan::ParamSpec> params = params_;
    place(cuts, params);
    const plan::ModelPlan plan =
        plan::plan_units(params, tree_, engine::plan_options_from(config_));
    return forecast_training(params, plan, tree_, config_, trainers_);
  }

  [[noreturn]] void refuse_host(const MemoryForecast& least, std::string_view advice) const {
    throw OutOfMemoryError(
        "strata.placement \"auto\": the host does not suffice; {}. Wanted of the host by each "
        "rank: {} ({}); it may take {}, beside {} of its device",
        advice, to_string(least.total_on(Tier::kHost)), kinds_on(least, Tier::kHost),
        to_string(*room_.host), to_string(*room_.device));
  }

  std::vector<plan::ParamSpec>& params_;
  const plan::ModuleTree& tree_;
  const engine::Config& config_;
  const Trainers& trainers_;
  const Room& room_;
  const std::vector<plan::UnitSpec> units_;
  std::vector<Item> items_;
};

}  // namespace

FreeMemory free_memory_of(const Job& job, std::optional<Bytes> device, std::optional<Bytes> host) {
  if (host) host = *host / std::max(ranks_of_a_host(job), 1);
  return {device, host, !job.on_gpus};
}

Room room_for(const engine::OffloadConfig& config, const FreeMemory& free) {
  Room room{config.device_budget, config.host_budget};
  if (!room.device && free.device && !free.is_one) room.device = *free.device / 3 * 2;
  if (!room.host && free.host) {
    room.host = *free.host / 4 * 3;
    if (free.is_one && room.device) room.host = std::max(Bytes(), *room.host - *room.device);
  }
  return room;
}

void place_automatically(std::vector<plan::ParamSpec>& params, const plan::ModuleTree& tree,
                         const engine::Config& config, const Trainers& trainers, const Room& room) {
  if (config.offload.automatic) Search(params, tree, config, trainers, room).run();
}

}  // namespace strata::forecast

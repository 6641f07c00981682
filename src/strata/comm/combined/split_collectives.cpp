#include <fmt/core.h>

#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/combined/collectives_pair.h"
#include "strata/comm/combined/combined_collectives.h"

namespace strata::comm {
namespace {

class SplitCollectives final : public PairedCollectives {
 public:
  explicit SplitCollectives(std::shared_ptr<CollectivesPair> pair)
      : PairedCollectives(pair->first().rank(),
                          split_traits(pair->first().traits(), pair->second().traits()), pair,
                          pair->second().traits().one_sided ? pair->second() : pair->first()),
        name_(fmt::format("{}/{}", pair->first().name(), pair->second().name())) {}

  std::string_view name() const override { return name_; }
  device::Stream* contribution_stream() override { return reductions().contribution_stream(); }

  std::unique_ptr<Work> all_gather(const SliceMap& slices, std::span<std::byte> flat,
                                   std::string_view tag) override {
    return pair_->guarded([&]() -> std::unique_ptr<Work> {
      std::shared_ptr<Work> work = gathers().all_gather(slices, flat, tag);
      if (!gathers().traits().gathers_on_device && traits().gathers_on_device) {
        std::erase_if(started_, [](const auto& started) { return started.expired(); });
        started_.push_back(work);
      }
      return std::make_unique<PairWork>(pair_, std::move(work));
    });
  }

  std::unique_ptr<Work> reduce_scatter(const Reduction& reduction, std::string_view tag) override {
    return pair_->guarded([&]() -> std::unique_ptr<Work> {
      return std::make_unique<PairWork>(pair_, reductions().reduce_scatter(reduction, tag));
    });
  }

  void record_times(bool on) override {
    gathers().record_times(on);
    reductions().record_times(on);
  }

  void all_reduce(std::span<double> values, ReduceOp op) override {
    pair_->guarded([&] { gathers().all_reduce(values, op); });
  }

  void all_gather_on_device(std::span<std::byte> all, std::span<const std::byte> mine) override {
    pair_->guarded([&] {
      // The exchange itself waits for gathers of its own collectives.
      for (const auto& gather : std::exchange(started_, {})) {
        if (const std::shared_ptr<Work> work = gather.lock()) work->wait();
      }
      Collectives& transport = gathers().traits().gathers_on_device ? gathers() : reductions();
      transport.all_gather_on_device(all, mine);
    });
  }

  void broadcast(std::span<std::byte> bytes, int root) override {
    pair_->guarded([&] { gathers().broadcast(bytes, root); });
  }

  std::vector<std::string> all_gather_text(const std::string& text) override {
    return pair_->guarded([&] { return gathers().all_gather_text(text); });
  }

  void barrier() override {
    pair_->guarded([&] {
      gathers().barrier();
      reductions().barrier();
    });
  }

 private:
  Collectives& gathers() const { return pair_->first(); }
  Collectives& reductions() const { return pair_->second(); }

  std::string name_;
  std::vector<std::weak_ptr<Work>> started_;  // gathers that an exchange has to wait for
};

}  // namespace

std::unique_ptr<Collectives> make_split_collectives(std::shared_ptr<Collectives> gathers,
                                                    std::shared_ptr<Collectives> reductions) {
  STRATA_ASSERT(!gathers->traits().one_sided || !reductions->traits().one_sided);
  STRATA_ASSERT(gathers->rank() == reductions->rank() &&
                gathers->world_size() == reductions->world_size());
  STRATA_ASSERT(gathers->shard_position().groups == 1 && gathers->shard_position().parts == 1);
  return std::make_unique<SplitCollectives>(
      std::make_shared<CollectivesPair>(std::move(gathers), std::move(reductions)));
}

}  // namespace strata::comm

#include "strata/comm/combined/combined_collectives.h"

#include <fmt/core.h>

#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/comm/combined/collectives_pair.h"

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
  device::Stream* stream(Traffic traffic) override {
    return (traffic == Traffic::kGathers ? gathers() : reductions()).stream(traffic);
  }

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
    return pair_->guarded(
        [&] { return pair_work(pair_, reductions().reduce_scatter(reduction, tag)); });
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

Traits joint(Traits traits) {
  traits.one_sided = false;
  return traits;
}

class JointGathers final : public Collectives {
 public:
  JointGathers(std::shared_ptr<Collectives> inner, std::shared_ptr<device::Device> device,
               RankNames names)
      : Collectives(inner->rank(), joint(inner->traits())),
        inner_(std::move(inner)),
        device_(std::move(device)),
        names_(names) {}

  std::string_view name() const override { return inner_->name(); }
  std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) override {
    return inner_->allocate(std::move(name), bytes);
  }
  std::unique_ptr<SharedBuffer> allocate_growing(std::string name, Bytes bytes) override {
    return inner_->allocate_growing(std::move(name), bytes);
  }
  void unmap_freed() override { inner_->unmap_freed(); }

  std::unique_ptr<Work> all_gather(const SliceMap& slices, std::span<std::byte> flat,
                                   std::string_view tag) override {
    if (slices.buffer != nullptr) return inner_->all_gather(slices, flat, tag);
    const BulkOperation gather = describe_gather(slices, flat, rank(), world_size(), tag);
    if (gather.source.empty()) return std::make_unique<CompletedWork>();
    make_room(slices.slice_bytes);
    // All ranks had read the other half at the last sync point, and this one at the point before.
    turn_ = 1 - turn_;
    const Bytes offset = slice_room_ * turn_;
    device::Stream& stream = slices.writer != nullptr ? *slices.writer : device_->compute_stream();
    device_->copy(staging_->local().subspan(offset.size(), gather.source.size()), gather.source,
                  stream);
    stream.synchronize();
    agree_on_operation(*inner_, gather.what, names_);
    inner_->all_gather({staging_.get(), offset, Bytes(), slices.slice_bytes}, flat, tag)->wait();
    device_->compute_stream().synchronize();
    return std::make_unique<CompletedWork>();
  }

  std::unique_ptr<Work> finish_gathers() override { return inner_->finish_gathers(); }

  std::unique_ptr<Work> reduce_scatter(const Reduction& reduction, std::string_view tag) override {
    return inner_->reduce_scatter(reduction, tag);
  }
  device::Stream* stream(Traffic traffic) override { return inner_->stream(traffic); }
  std::unique_ptr<Inbox> make_inbox(std::string name, Bytes bytes) override {
    return inner_->make_inbox(std::move(name), bytes);
  }
  void record_times(bool on) override { inner_->record_times(on); }
  void all_reduce(std::span<double> values, ReduceOp op) override {
    inner_->all_reduce(values, op);
  }
  void all_gather_on_device(std::span<std::byte> all, std::span<const std::byte> mine) override {
    inner_->all_gather_on_device(all, mine);
  }
  void broadcast(std::span<std::byte> bytes, int root) override { inner_->broadcast(bytes, root); }
  std::vector<std::string> all_gather_text(const std::string& text) override {
    return inner_->all_gather_text(text);
  }
  void barrier() override { inner_->barrier(); }
  void announce_departure(std::string_view words) override {
    Collectives::announce_departure(words);
    inner_->announce_departure(words);
  }
  void all_left() noexcept override { inner_->all_left(); }

  void require_usable() override { inner_->require_usable(); }
  void end(Ending ending, std::string_view reason) noexcept override {
    inner_->end(ending, reason);
  }

 private:
  // All ranks come here with the same sizes, in the same order.
  void make_room(Bytes slice) {
    if (staging_ != nullptr && slice <= slice_room_) return;
    inner_->barrier();  // no rank reads the memory that is freed now
    staging_.reset();
    slice_room_ = align_up(slice, 4_KiB);
    staging_ = inner_->allocate(fmt::format("joint gathers {}", ++allocated_), slice_room_ * 2);
  }

  std::shared_ptr<Collectives> inner_;
  std::shared_ptr<device::Device> device_;
  RankNames names_;
  std::unique_ptr<SharedBuffer> staging_;  // two slices
  Bytes slice_room_;
  int allocated_ = 0;
  int turn_ = 0;
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

std::shared_ptr<Collectives> make_joint_gathers(std::shared_ptr<Collectives> inner,
                                                std::shared_ptr<device::Device> device,
                                                RankNames names) {
  STRATA_ASSERT(inner->traits().one_sided && inner->shard_position().groups == 1);
  return std::make_shared<JointGathers>(std::move(inner), std::move(device), names);
}

}  // namespace strata::comm

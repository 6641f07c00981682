#include "strata/comm/combined/grouped_collectives.h"

#include <fmt/core.h>

#include <charconv>
#include <utility>

#include "strata/base/error.h"
#include "strata/comm/combined/collectives_pair.h"
#include "strata/comm/combined/replica_sums.h"

namespace strata::comm {
namespace {

// Texts one after the other, each behind its length.
std::string packed(const std::vector<std::string>& texts) {
  std::string result;
  for (const std::string& text : texts) {
    result += std::to_string(text.size());
    result += ' ';
    result += text;
  }
  return result;
}

void unpack(const std::string& pack, std::vector<std::string>& texts) {
  for (std::size_t at = 0; at < pack.size();) {
    std::size_t length = 0;
    const char* end = pack.data() + pack.size();
    const char* text = std::from_chars(pack.data() + at, end, length).ptr + 1;
    texts.emplace_back(text, length);
    at = static_cast<std::size_t>(text - pack.data()) + length;
  }
}

// Shared by the Collectives and its Works, which may outlive it.
class Core final : public CollectivesPair {
 public:
  Core(std::shared_ptr<Collectives> inside, std::shared_ptr<Collectives> across,
       std::shared_ptr<device::Device> device, Slices slices)
      : CollectivesPair(std::move(inside), std::move(across)),
        device_(std::move(device)),
        sums_(first(), second(), *device_, slices == Slices::kSecondary) {}

  Collectives& inside() const { return first(); }
  Collectives& across() const { return second(); }
  device::Device& device() { return *device_; }
  ReplicaSums& sums() { return sums_; }

 private:
  std::shared_ptr<device::Device> device_;
  ReplicaSums sums_;
};

class GroupedReduction final : public Work {
 public:
  GroupedReduction(std::shared_ptr<Core> core, ReplicaSums::Started started)
      : core_(std::move(core)), started_(std::move(started)) {}
  ~GroupedReduction() override {
    try {
      wait();
    } catch (const std::exception&) {
      return;  // who wants the error calls wait()
    }
  }

  bool done() override {
    if (core_->broken() || core_->sums().complete(started_.number)) return true;
    return core_->guarded([&] { return core_->sums().poll(started_.number); });
  }
  void wait() override {
    if (core_->sums().complete(started_.number)) return;
    core_->guarded([&] { core_->sums().finish(started_.number); });
  }
  void wait_for_readers() override {
    if (core_->sums().complete(started_.number)) return;
    core_->guarded([&] { core_->sums().wait_for_readers(started_.number); });
  }
  WorkTimes times() const override { return started_.times; }

 private:
  std::shared_ptr<Core> core_;
  ReplicaSums::Started started_;
};

class GroupedCollectives final : public Collectives {
 public:
  GroupedCollectives(std::shared_ptr<Collectives> inside, std::shared_ptr<Collectives> across,
                     std::shared_ptr<device::Device> device, Slices slices)
      : Collectives(across->rank() * inside->world_size() + inside->rank(),
                    grouped_traits(inside->traits(), across->traits(), slices)),
        name_(inside->name() == across->name()
                  ? std::string(inside->name())
                  : fmt::format("{}+{}", inside->name(), across->name())),
        groups_{inside->world_size(), across->world_size()},
        core_(std::make_shared<Core>(std::move(inside), std::move(across), std::move(device),
                                     slices)) {}

  std::string_view name() const override { return name_; }

  std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) override {
    return core_->guarded([&] { return core_->inside().allocate(std::move(name), bytes); });
  }
  std::unique_ptr<SharedBuffer> allocate_growing(std::string name, Bytes bytes) override {
    return core_->guarded([&] { return core_->inside().allocate_growing(std::move(name), bytes); });
  }
  void unmap_freed() override {
    core_->guarded([&] { core_->inside().unmap_freed(); });
  }

  std::unique_ptr<Work> all_gather(const SliceMap& slices, std::span<std::byte> flat,
                                   std::string_view tag) override {
    return core_->guarded([&]() -> std::unique_ptr<Work> {
      return std::make_unique<PairWork>(core_, core_->inside().all_gather(slices, flat, tag));
    });
  }

  std::unique_ptr<Work> finish_gathers() override {
    return core_->guarded([&]() -> std::unique_ptr<Work> {
      return pair_work(core_, core_->inside().finish_gathers());
    });
  }

  void complete_slices(std::span<const SliceMap> slices) override;

  std::unique_ptr<Work> reduce_scatter(const Reduction& reduction, std::string_view tag) override {
    return core_->guarded([&]() -> std::unique_ptr<Work> {
      if (groups_.count == 1)
        return std::make_unique<PairWork>(core_, core_->inside().reduce_scatter(reduction, tag));
      return std::make_unique<GroupedReduction>(core_, core_->sums().start(reduction, tag));
    });
  }
  void record_times(bool on) override { core_->inside().record_times(on); }

  void all_reduce(std::span<double> values, ReduceOp op) override {
    core_->guarded([&] {
      core_->sums().finish_all();
      core_->inside().all_reduce(values, op);
      core_->across().all_reduce(values, op);
    });
  }

  // Along the root's replicas, then inside each group.
  void broadcast(std::span<std::byte> bytes, int root) override {
    if (root < 0 || root >= world_size()) {
      throw UsageError(fmt::format("the root of a broadcast must be a rank, 0 to {}; got {}",
                                   world_size() - 1, root));
    }
    core_->guarded([&] {
      core_->sums().finish_all();
      if (groups_.index_of(root) == groups_.index_of(rank()))
        core_->across().broadcast(bytes, groups_.group_of(root));
      core_->inside().broadcast(bytes, groups_.index_of(root));
    });
  }

  std::vector<std::string> all_gather_text(const std::string& text) override {
    return core_->guarded([&] {
      core_->sums().finish_all();
      std::vector<std::string> mine = core_->inside().all_gather_text(text);
      if (groups_.count == 1) return mine;
      std::vector<std::string> all;
      for (const std::string& pack : core_->across().all_gather_text(packed(mine)))
        unpack(pack, all);
      return all;
    });
  }

  void barrier() override {
    core_->guarded([&] {
      core_->sums().finish_all();
      core_->inside().barrier();
      core_->across().barrier();
    });
  }

  void group_barrier() override {
    core_->guarded([&] { core_->inside().barrier(); });
  }

  void announce_departure(std::string_view words) override {
    Collectives::announce_departure(words);
    core_->announce_departure(words);
  }
  void all_left() noexcept override { core_->all_left(); }

  void require_usable() override {
    core_->guarded([&] {
      core_->inside().require_usable();
      core_->across().require_usable();
    });
  }

  void end(Ending ending, std::string_view reason) noexcept override { core_->end(ending, reason); }

 private:
  void complete_from_memory(std::span<const SliceMap> slices);

  std::string name_;
  ShardGroups groups_;
  std::shared_ptr<Core> core_;
  std::unique_ptr<SharedBuffer> parts_;  // own ones, for replicas that read them; null: none yet
};

std::span<std::byte> memory_of(const SliceMap& slice, int index) {
  const Bytes begin = slice.first_offset + slice.stride * index;
  return const_cast<SharedBuffer*>(slice.buffer)
      ->local()
      .subspan(begin.size(), slice.slice_bytes.size());
}

void GroupedCollectives::complete_slices(std::span<const SliceMap> slices) {
  if (shard_position().parts == 1) return;
  core_->guarded([&] {
    core_->sums().finish_all();
    if (core_->across().traits().one_sided) {
      complete_from_memory(slices);
      return;
    }
    std::vector<std::unique_ptr<Work>> works;
    for (const SliceMap& slice : slices) {
      const Bytes part(slice.slice_bytes.value / shard_position().parts);
      const Bytes begin = slice.first_offset + slice.stride * shard_position().held_index();
      works.push_back(core_->across().all_gather({slice.buffer, begin, part, part},
                                                 memory_of(slice, shard_position().held_index()),
                                                 "complete slices"));
    }
    for (const auto& work : works) work->wait();
  });
}

// Replicas read no memory but what `across` has allocated.
void GroupedCollectives::complete_from_memory(std::span<const SliceMap> slices) {
  Bytes total;
  for (const SliceMap& slice : slices)
    total += Bytes(slice.slice_bytes.value / shard_position().parts);
  Collectives& across = core_->across();
  if (parts_ == nullptr || Bytes(parts_->local().size()) < total) {
    parts_.reset();
    parts_ = across.allocate("replicas.parts", total);
  }
  device::Device& device = core_->device();
  Bytes at;
  for (const SliceMap& slice : slices) {
    const Bytes part(slice.slice_bytes.value / shard_position().parts);
    const auto own = memory_of(slice, shard_position().held_index())
                         .subspan((part * (shard_position().index % shard_position().parts)).size(),
                                  part.size());
    device.copy(parts_->local().subspan(at.size(), part.size()), own, device.compute_stream());
    at += part;
  }
  across.barrier();
  std::vector<std::unique_ptr<Work>> works;
  at = Bytes();
  for (const SliceMap& slice : slices) {
    const Bytes part(slice.slice_bytes.value / shard_position().parts);
    works.push_back(across.all_gather({parts_.get(), at, Bytes(), part},
                                      memory_of(slice, shard_position().held_index()),
                                      "complete slices"));
    at += part;
  }
  for (const auto& work : works) work->wait();
  across.barrier();
}

}  // namespace

std::unique_ptr<Collectives> make_grouped_collectives(std::shared_ptr<Collectives> inside,
                                                      std::shared_ptr<Collectives> across,
                                                      std::shared_ptr<device::Device> device,
                                                      Slices slices) {
  return std::make_unique<GroupedCollectives>(std::move(inside), std::move(across),
                                              std::move(device), slices);
}

}  // namespace strata::comm

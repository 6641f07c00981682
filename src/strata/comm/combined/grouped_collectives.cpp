#include <fmt/core.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/comm/collectives.h"
#include "strata/comm/combined/collectives_pair.h"
#include "strata/comm/combined/combined_collectives.h"

namespace strata::comm {
namespace {

std::span<float> floats(SharedBuffer& buffer, Numel begin, Numel numel) {
  return {reinterpret_cast<float*>(buffer.local().data()) + begin.size(), numel.size()};
}

// The reductions of one rank in shard groups, from the reduce-scatter inside the group to the sum
// over the replicas. Steps of one, each started when the one before is complete:
//   inside     adds up the group's contributions
//   summing    adds up the replicas' slices, or a part of them
//   gathering  the parts, where replicas do not read each other's memory and want them all
// start() brings every earlier reduction one step further, oldest first; finish() brings them to
// their end. So operations across follow each other in the order of reductions on every rank, and
// between the others in the same way wherever ranks make the same calls.
//
// Threads: one. Ownership: shares the parts, owns the scratch memory. Errors: those of the parts.
class ReplicaSums {
 public:
  // `owns_part`: this rank wants no more of the sum than its part.
  ReplicaSums(Collectives& inside, Collectives& across, device::Device& device, bool owns_part)
      : inside_(inside),
        across_(across),
        device_(device),
        owns_part_(owns_part),
        replicas_read_each_other_(across.traits().one_sided && across.traits().deterministic),
        replicas_(across.world_size()) {}

  struct Started {
    std::uint64_t number = 0;
    WorkTimes times;  // of the part inside
  };
  Started start(const Reduction& reduction, std::string_view tag) {
    STRATA_ASSERT(reduction.replicas != Replicas::kSumAll || reduction.accumulate);
    STRATA_ASSERT(reduction.replicas == Replicas::kSum || !owns_part_);
    for (Pending& pending : pending_) advance(pending);
    drop_complete();
    Pending next;
    next.number = next_;
    next.reduction = reduction;
    next.tag = std::string(tag);
    Reduction own = reduction;
    if (reduction.replicas == Replicas::kSum) {
      const Numel numel(reduction.result.size());
      next.scratch = take(numel);
      own.result = floats(*next.scratch->terms, Numel(), inside_of(numel));
      own.accumulate = false;
      // The scratch may be one that replicas have read until now, as the compute stream knows.
      if (own.writer != nullptr) own.writer->wait_for(*device_.compute_stream().record());
    }
    next.work = inside_.reduce_scatter(own, tag);
    const WorkTimes times = next.work->times();
    pending_.push_back(std::move(next));
    return {next_++, times};
  }

  bool complete(std::uint64_t number) const {
    if (pending_.empty() || number < pending_.front().number) return true;
    return pending_[number - pending_.front().number].step == Step::kComplete;
  }
  // Does what can be done for it without an operation across.
  bool poll(std::uint64_t number) {
    for (const Pending& pending : pending_) {
      if (pending.work != nullptr) pending.work->done();
    }
    return complete(number);
  }
  void wait_for_readers(std::uint64_t number) {
    Pending* pending = find(number);
    if (pending != nullptr && pending->step == Step::kInside) pending->work->wait();
  }
  // Completes the reductions up to this one; without one, all.
  // A sum across begins when the gather before it has; only its end may come later.
  void finish(std::uint64_t number) {
    for (Pending& pending : pending_) {
      if (pending.number > number) break;
      while (pending.step < Step::kGathering) advance(pending);
    }
    for (Pending& pending : pending_) {
      if (pending.number > number) break;
      advance(pending);
    }
    drop_complete();
  }
  void finish_all() {
    if (next_ > 0) finish(next_ - 1);
  }

 private:
  enum class Step { kInside, kSumming, kGathering, kComplete };
  // A slice in fp32 that replicas may read, and the memory into which sums of parts are gathered.
  struct Scratch {
    std::unique_ptr<SharedBuffer> terms;
    std::unique_ptr<SharedBuffer> sums;  // null where no parts are gathered
  };
  struct Pending {
    std::uint64_t number = 0;
    Reduction reduction;
    std::string tag;
    std::unique_ptr<Scratch> scratch;
    Step step = Step::kInside;
    std::unique_ptr<Work> work;  // of the step
  };

  std::unique_ptr<Scratch> take(Numel numel) {
    auto& free = free_[numel.value];
    if (!free.empty()) {
      auto scratch = std::move(free.back());
      free.pop_back();
      return scratch;
    }
    auto scratch = std::make_unique<Scratch>();
    const int number = scratches_++;
    const auto allocate = [&](const char* what, Numel elements) {
      return across_.allocate(fmt::format("replicas.{}.{}", what, number),
                              bytes_of(elements, DType::kFloat32));
    };
    // The padding of the last part is zero and stays zero.
    const Numel parts = part_of(numel) * replicas_;
    scratch->terms = allocate("terms", gathers() ? parts : numel * replicas_);
    if (gathers()) scratch->sums = allocate("sums", parts);
    return scratch;
  }
  Numel part_of(Numel numel) const { return Numel((numel.value + replicas_ - 1) / replicas_); }
  // The elements that the group's reduction gives this rank, for a result of `numel` elements.
  Numel inside_of(Numel numel) const { return owns_part_ ? numel * replicas_ : numel; }
  bool gathers() const { return !owns_part_ && !replicas_read_each_other_; }
  // The next step begins when the work of the present one is complete.
  void advance(Pending& pending) {
    if (pending.step == Step::kComplete) return;
    pending.work->wait();
    switch (pending.step) {
      case Step::kInside:
        if (pending.reduction.replicas == Replicas::kLater || pending.reduction.result.empty())
          pending.step = Step::kComplete;
        else
          begin_sum(pending);
        return;
      case Step::kSumming:
        if (gathers())
          begin_gather(pending);
        else
          pending.step = Step::kComplete;
        return;
      case Step::kGathering:
        fold(pending);
        pending.step = Step::kComplete;
        return;
      case Step::kComplete:
        return;
    }
  }
  void begin_sum(Pending& pending) {
    const Reduction& reduction = pending.reduction;
    const Numel numel(reduction.result.size());
    if (pending.scratch == nullptr) pending.scratch = take(numel);
    SharedBuffer& terms = *pending.scratch->terms;
    device::Stream& stream = device_.compute_stream();
    const auto slice = std::as_writable_bytes(floats(terms, Numel(), numel));
    if (reduction.replicas == Replicas::kSumAll)
      device_.copy(slice, std::as_bytes(reduction.result), stream);
    Reduction sum;
    sum.source = &terms;
    if (owns_part_) {
      sum.result = reduction.result;
      sum.accumulate = reduction.accumulate;
    } else if (replicas_read_each_other_) {
      // Every replica's slice of the contribution is all of it: each of them adds up the same.
      for (int replica = 1; replica < replicas_; ++replica)
        device_.copy(std::as_writable_bytes(floats(terms, numel * replica, numel)), slice, stream);
      sum.result = reduction.result;
      sum.accumulate = reduction.accumulate && reduction.replicas == Replicas::kSum;
    } else {
      const Numel part = part_of(numel);
      sum.result = floats(*pending.scratch->sums, part * across_.rank(), part);
    }
    pending.step = Step::kSumming;
    pending.work = across_.reduce_scatter(sum, pending.tag);
  }
  void begin_gather(Pending& pending) {
    SharedBuffer& sums = *pending.scratch->sums;
    const Bytes part = bytes_of(part_of(Numel(pending.reduction.result.size())), DType::kFloat32);
    pending.step = Step::kGathering;
    pending.work = across_.all_gather({&sums, Bytes(), part, part}, sums.local(), pending.tag);
  }
  void fold(Pending& pending) {
    const Reduction& reduction = pending.reduction;
    const std::span<std::byte> target = std::as_writable_bytes(reduction.result);
    const std::span<const std::byte> sum =
        pending.scratch->sums->local().first(reduction.result.size_bytes());
    device::Stream& stream = device_.compute_stream();
    if (reduction.accumulate && reduction.replicas == Replicas::kSum) {
      device_.accumulate(target.data(), DType::kFloat32, sum.data(), DType::kFloat32,
                         Numel(reduction.result.size()), stream);
    } else {
      device_.copy(target, sum, stream);
    }
  }
  void drop_complete() {
    while (!pending_.empty() && pending_.front().step == Step::kComplete) {
      Pending& first = pending_.front();
      if (first.scratch != nullptr)
        free_[static_cast<std::int64_t>(first.reduction.result.size())].push_back(
            std::move(first.scratch));
      pending_.pop_front();
    }
  }
  Pending* find(std::uint64_t number) {
    return complete(number) ? nullptr : &pending_[number - pending_.front().number];
  }

  Collectives& inside_;
  Collectives& across_;
  device::Device& device_;
  bool owns_part_;
  bool replicas_read_each_other_;
  int replicas_;
  std::uint64_t next_ = 0;
  int scratches_ = 0;
  std::map<std::int64_t, std::vector<std::unique_ptr<Scratch>>> free_;  // by elements of a slice
  std::deque<Pending> pending_;                                         // the oldest first
};

// Shared by the Collectives and its Works, which may outlive it.
class GroupedCore final : public CollectivesPair {
 public:
  GroupedCore(std::shared_ptr<Collectives> inside, std::shared_ptr<Collectives> across,
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
  GroupedReduction(std::shared_ptr<GroupedCore> core, ReplicaSums::Started started)
      : core_(std::move(core)), started_(std::move(started)) {}
  ~GroupedReduction() override { wait_quietly(); }

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
  std::shared_ptr<GroupedCore> core_;
  ReplicaSums::Started started_;
};

class GroupedCollectives final : public PairedCollectives {
 public:
  GroupedCollectives(std::shared_ptr<GroupedCore> core, Slices slices)
      : PairedCollectives(
            core->across().rank() * core->inside().world_size() + core->inside().rank(),
            grouped_traits(core->inside().traits(), core->across().traits(), slices), core,
            core->inside()),
        name_(core->inside().name() == core->across().name()
                  ? std::string(core->inside().name())
                  : fmt::format("{}+{}", core->inside().name(), core->across().name())),
        groups_{core->inside().world_size(), core->across().world_size()},
        core_(std::move(core)) {}

  std::string_view name() const override { return name_; }

  std::unique_ptr<Work> all_gather(const SliceMap& slices, std::span<std::byte> flat,
                                   std::string_view tag) override {
    return core_->guarded(
        [&] { return pair_work(core_, core_->inside().all_gather(slices, flat, tag)); });
  }

  void complete_slices(std::span<const SliceMap> slices) override {
    const int parts = shard_position().parts;
    if (parts == 1) return;
    core_->guarded([&] {
      core_->sums().finish_all();
      Collectives& across = core_->across();
      // Replicas read no memory but what `across` has allocated.
      const bool copies = across.traits().one_sided;
      if (copies) copy_own_parts(slices);
      std::vector<std::unique_ptr<Work>> works;
      Bytes at;
      for (const SliceMap& slice : slices) {
        const Bytes part(slice.slice_bytes.value / parts);
        const Bytes begin = slice.first_offset + slice.stride * shard_position().held_index();
        const SliceMap from = copies ? SliceMap{parts_.get(), at, Bytes(), part}
                                     : SliceMap{slice.buffer, begin, part, part};
        works.push_back(across.all_gather(from, held_slice(slice), "complete slices"));
        at += part;
      }
      for (const auto& work : works) work->wait();
      if (copies) across.barrier();
    });
  }

  std::unique_ptr<Work> reduce_scatter(const Reduction& reduction, std::string_view tag) override {
    return core_->guarded([&]() -> std::unique_ptr<Work> {
      if (groups_.count == 1)
        return pair_work(core_, core_->inside().reduce_scatter(reduction, tag));
      return std::make_unique<GroupedReduction>(core_, core_->sums().start(reduction, tag));
    });
  }
  std::unique_ptr<Work> exchange(const Exchange& exchange, std::string_view tag) override {
    return core_->guarded(
        [&] { return pair_work(core_, core_->inside().exchange(exchange, tag)); });
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
    describe_broadcast(Bytes(bytes.size()), root, world_size());  // checks the root
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
      // As CBOR, in which texts may hold any bytes.
      std::string packed;
      nlohmann::json::to_cbor(mine, packed);
      for (const std::string& pack : core_->across().all_gather_text(packed)) {
        for (std::string& one : nlohmann::json::from_cbor(pack).get<std::vector<std::string>>())
          all.push_back(std::move(one));
      }
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

 private:
  std::span<std::byte> held_slice(const SliceMap& slice) const {
    const Bytes begin = slice.first_offset + slice.stride * shard_position().held_index();
    return const_cast<SharedBuffer*>(slice.buffer)
        ->local()
        .subspan(begin.size(), slice.slice_bytes.size());
  }
  // Copies the parts that this rank owns to parts_, and waits until every replica has done so.
  void copy_own_parts(std::span<const SliceMap> slices) {
    const int parts = shard_position().parts;
    Bytes total;
    for (const SliceMap& slice : slices) total += Bytes(slice.slice_bytes.value / parts);
    if (parts_ == nullptr || Bytes(parts_->local().size()) < total) {
      parts_.reset();
      parts_ = core_->across().allocate("replicas.parts", total);
    }
    device::Device& device = core_->device();
    Bytes at;
    for (const SliceMap& slice : slices) {
      const Bytes part(slice.slice_bytes.value / parts);
      const Bytes own = part * (shard_position().index % parts);
      device.copy(parts_->local().subspan(at.size(), part.size()),
                  held_slice(slice).subspan(own.size(), part.size()), device.compute_stream());
      at += part;
    }
    core_->across().barrier();
  }

  std::string name_;
  ShardGroups groups_;
  std::shared_ptr<GroupedCore> core_;
  std::unique_ptr<SharedBuffer> parts_;  // own ones, for replicas that read them; null: none yet
};

}  // namespace

std::unique_ptr<Collectives> make_grouped_collectives(std::shared_ptr<Collectives> inside,
                                                      std::shared_ptr<Collectives> across,
                                                      std::shared_ptr<device::Device> device,
                                                      Slices slices) {
  return std::make_unique<GroupedCollectives>(
      std::make_shared<GroupedCore>(std::move(inside), std::move(across), std::move(device),
                                    slices),
      slices);
}

}  // namespace strata::comm

#include "strata/comm/grouped_collectives.h"

#include <fmt/format.h>

#include <charconv>
#include <utility>

#include "strata/base/error.h"
#include "strata/comm/replica_sums.h"

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
class Core {
 public:
  Core(std::shared_ptr<Collectives> inside, std::shared_ptr<Collectives> across,
       std::shared_ptr<device::Device> device)
      : inside_(std::move(inside)),
        across_(std::move(across)),
        device_(std::move(device)),
        sums_(*inside_, *across_, *device_) {}

  Collectives& inside() { return *inside_; }
  Collectives& across() { return *across_; }
  ReplicaSums& sums() { return sums_; }
  bool broken() const { return !failure_.empty(); }

  // What one part throws is the end of the other, too, so that all ranks hear of it.
  template <typename Call>
  auto guarded(Call&& call) -> decltype(call()) {
    if (broken()) throw CommError(failure_);
    try {
      return std::forward<Call>(call)();
    } catch (const CommError& error) {
      if (!broken()) failure_ = error.what();
      inside_->abort(failure_);
      across_->abort(failure_);
      throw CommError(failure_);
    }
  }

 private:
  std::shared_ptr<Collectives> inside_;
  std::shared_ptr<Collectives> across_;
  std::shared_ptr<device::Device> device_;
  ReplicaSums sums_;
  std::string failure_;
};

class GroupedReduction final : public Work {
 public:
  GroupedReduction(std::shared_ptr<Core> core, ReplicaSums::Started started)
      : core_(std::move(core)), started_(std::move(started)) {}
  ~GroupedReduction() override {
    try {
      wait();
    } catch (const Error&) {  // as documented: who wants the error calls wait()
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

// Of `inside`; its errors end `across`, too.
class GroupWork final : public Work {
 public:
  GroupWork(std::shared_ptr<Core> core, std::unique_ptr<Work> work)
      : core_(std::move(core)), work_(std::move(work)) {}

  bool done() override { return work_->done(); }
  void wait() override {
    core_->guarded([&] { work_->wait(); });
  }
  WorkTimes times() const override { return work_->times(); }

 private:
  std::shared_ptr<Core> core_;
  std::unique_ptr<Work> work_;
};

class GroupedCollectives final : public Collectives {
 public:
  GroupedCollectives(std::shared_ptr<Collectives> inside, std::shared_ptr<Collectives> across,
                     std::shared_ptr<device::Device> device)
      : name_(inside->name() == across->name()
                  ? std::string(inside->name())
                  : fmt::format("{}+{}", inside->name(), across->name())),
        place_{inside->rank(), inside->world_size(), across->rank(), across->world_size()},
        core_(std::make_shared<Core>(std::move(inside), std::move(across), std::move(device))) {}

  std::string_view name() const override { return name_; }
  int rank() const override { return place_.group * place_.count + place_.index; }
  int world_size() const override { return place_.groups * place_.count; }
  ShardPlace shard_place() const override { return place_; }
  bool one_sided() const override { return core_->inside().one_sided(); }
  bool deterministic() const override {
    return core_->inside().deterministic() && core_->across().deterministic();
  }
  // What the replicas add up is fp32 by then.
  bool sums_in_fp32() const override { return core_->inside().sums_in_fp32(); }

  std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) override {
    return core_->guarded([&] { return core_->inside().allocate(std::move(name), bytes); });
  }
  std::unique_ptr<SharedBuffer> allocate_growing(std::string name, Bytes bytes) override {
    return core_->guarded([&] { return core_->inside().allocate_growing(std::move(name), bytes); });
  }

  std::unique_ptr<Work> all_gather(const SliceMap& slices, std::span<std::byte> flat,
                                   std::string_view tag) override {
    return core_->guarded([&]() -> std::unique_ptr<Work> {
      return std::make_unique<GroupWork>(core_, core_->inside().all_gather(slices, flat, tag));
    });
  }

  std::unique_ptr<Work> reduce_scatter(const Reduction& reduction, std::string_view tag) override {
    return core_->guarded([&]() -> std::unique_ptr<Work> {
      if (place_.groups == 1)
        return std::make_unique<GroupWork>(core_, core_->inside().reduce_scatter(reduction, tag));
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
      if (root % place_.count == place_.index)
        core_->across().broadcast(bytes, root / place_.count);
      core_->inside().broadcast(bytes, root % place_.count);
    });
  }

  std::vector<std::string> all_gather_text(const std::string& text) override {
    return core_->guarded([&] {
      core_->sums().finish_all();
      std::vector<std::string> mine = core_->inside().all_gather_text(text);
      if (place_.groups == 1) return mine;
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

  void abort(std::string_view reason) noexcept override {
    core_->inside().abort(reason);
    core_->across().abort(reason);
  }

 private:
  std::string name_;
  ShardPlace place_;
  std::shared_ptr<Core> core_;
};

}  // namespace

std::unique_ptr<Collectives> make_grouped_collectives(std::shared_ptr<Collectives> inside,
                                                      std::shared_ptr<Collectives> across,
                                                      std::shared_ptr<device::Device> device) {
  return std::make_unique<GroupedCollectives>(std::move(inside), std::move(across),
                                              std::move(device));
}

}  // namespace strata::comm

// Ranks, which are threads, on devices whose streams run late: peer collectives, alone or in shard
// groups; and HostResults, with which tests of the host's memory use them.
// Threads, errors: collectives.h.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/grouped_ranks.h"
#include "device/late_device.h"
#include "strata/comm/peer/peer_collectives.h"

namespace strata::comm::conformance {

// Every rank has streams of other paces.
inline std::shared_ptr<device::LateDevice> late_device(int rank) {
  return std::make_shared<device::LateDevice>(device::CpuDeviceOptions{},
                                              static_cast<std::uint64_t>(rank) * 1000 + 1);
}

// Makes peers the transport within and across groups.
inline void join_by_peers(GroupedRanks& ranks, std::chrono::milliseconds timeout) {
  const auto peers = [timeout](std::unique_ptr<Collectives> control, RankNames names,
                               const std::shared_ptr<device::Device>& device) {
    CommOptions options;
    options.timeout = timeout;
    options.names = names;
    return make_peer_collectives(device, std::move(control), options);
  };
  ranks.set_inside(peers);
  ranks.set_network(peers);
}

// Copies the complete result of a reduction from the device's memory to the host's, for tests that
// read it there. The compute stream has then ended its work, so the host may overwrite the
// operation's source.
class HostResult final : public Work {
 public:
  HostResult(device::Device& device, std::unique_ptr<device::Memory> there, std::span<float> here)
      : device_(device), there_(std::move(there)), here_(std::as_writable_bytes(here)) {
    device_.copy(there_->bytes(), here_, device_.compute_stream());
  }
  ~HostResult() override {
    try {
      wait();
    } catch (const Error&) {  // as documented, only wait() reports the error
      work_.reset();
    }
    settle();
  }
  std::span<float> there() {
    return {reinterpret_cast<float*>(there_->bytes().data()), here_.size() / sizeof(float)};
  }
  void started(std::unique_ptr<Work> work) { work_ = std::move(work); }

  bool done() override {
    if (!work_->done()) return false;
    fetch();
    return true;
  }
  void wait() override {
    if (work_ == nullptr) return;
    work_->wait();
    fetch();
  }
  void wait_for_readers() override {
    work_->wait_for_readers();
    settle();
  }
  WorkTimes times() const override { return work_->times(); }

 private:
  void fetch() {
    if (!std::exchange(fetched_, true))
      device_.copy(here_, there_->bytes(), device_.compute_stream());
    settle();
  }
  void settle() { device_.compute_stream().synchronize(); }

  device::Device& device_;
  std::unique_ptr<device::Memory> there_;
  std::span<std::byte> here_;
  std::unique_ptr<Work> work_;  // null: never started
  bool fetched_ = false;
};

// A gather that is complete for the host, too, when it has waited.
class HostGather final : public Work {
 public:
  HostGather(device::Device& device, std::unique_ptr<Work> work)
      : device_(device), work_(std::move(work)) {}
  bool done() override { return work_->done(); }
  void wait() override {
    work_->wait();
    device_.compute_stream().synchronize();
  }
  WorkTimes times() const override { return work_->times(); }

 private:
  device::Device& device_;
  std::unique_ptr<Work> work_;
};

// Collectives of a device to which results in ordinary memory may be given, as the conformance
// suite does.
class HostResults final : public Collectives {
 public:
  HostResults(std::unique_ptr<Collectives> collectives, std::shared_ptr<device::Device> device)
      : Collectives(collectives->rank(), with_no_inbox(collectives->traits())),
        device_(std::move(device)),
        collectives_(std::move(collectives)) {}

  std::string_view name() const override { return collectives_->name(); }
  void record_times(bool on) override { collectives_->record_times(on); }
  device::Stream* stream(Traffic traffic) override { return collectives_->stream(traffic); }

  std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) override {
    return collectives_->allocate(std::move(name), bytes);
  }
  std::unique_ptr<SharedBuffer> allocate_growing(std::string name, Bytes bytes) override {
    return collectives_->allocate_growing(std::move(name), bytes);
  }
  void unmap_freed() override { collectives_->unmap_freed(); }
  std::unique_ptr<Work> all_gather(const SliceMap& slices, std::span<std::byte> flat,
                                   std::string_view tag) override {
    return std::make_unique<HostGather>(*device_, collectives_->all_gather(slices, flat, tag));
  }
  std::unique_ptr<Work> finish_gathers() override {
    auto work = collectives_->finish_gathers();
    return work == nullptr ? nullptr : std::make_unique<HostGather>(*device_, std::move(work));
  }
  void complete_slices(std::span<const SliceMap> slices) override {
    collectives_->complete_slices(slices);
  }
  std::unique_ptr<Work> reduce_scatter(const Reduction& reduction, std::string_view tag) override {
    auto result = std::make_unique<HostResult>(
        *device_, device_->allocate_uncharged(Bytes(reduction.result.size_bytes())),
        reduction.result);
    Reduction there = reduction;
    there.result = result->there();
    result->started(collectives_->reduce_scatter(there, tag));
    return result;
  }
  std::unique_ptr<Work> exchange(const Exchange& exchange, std::string_view tag) override {
    return std::make_unique<HostGather>(*device_, collectives_->exchange(exchange, tag));
  }
  void all_reduce(std::span<double> values, ReduceOp op) override {
    collectives_->all_reduce(values, op);
  }
  void all_gather_on_device(std::span<std::byte> all, std::span<const std::byte> mine) override {
    collectives_->all_gather_on_device(all, mine);
  }
  void broadcast(std::span<std::byte> bytes, int root) override {
    collectives_->broadcast(bytes, root);
  }
  std::vector<std::string> all_gather_text(const std::string& text) override {
    return collectives_->all_gather_text(text);
  }
  void barrier() override { collectives_->barrier(); }
  void group_barrier() override { collectives_->group_barrier(); }
  void announce_departure(std::string_view words) override {
    Collectives::announce_departure(words);
    collectives_->announce_departure(words);
  }

  void require_usable() override { collectives_->require_usable(); }
  void end(Ending ending, std::string_view reason) noexcept override {
    collectives_->end(ending, reason);
  }

 private:
  static Traits with_no_inbox(Traits traits) {
    traits.has_inbox = false;
    return traits;
  }

  std::shared_ptr<device::Device> device_;
  std::unique_ptr<Collectives> collectives_;
};

}  // namespace strata::comm::conformance

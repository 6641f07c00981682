#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/comm/host/host_collectives.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/base/tensors.h"
#include "strata/torch/ranks/c10d_collectives.h"
#include "strata/torch/ranks/group_work.h"

namespace strata::torch {
namespace {

c10::Stream pooled_stream(c10::Device place) {
  return c10::impl::VirtualGuardImpl(place.type()).getStreamFromGlobalPool(place);
}

// result = scale * sum, or result += scale * sum, in fp32.
void fold(const at::Tensor& result, const at::Tensor& sum, double scale, bool accumulate) {
  if (accumulate) {
    result.add_(sum, scale);
    return;
  }
  result.copy_(sum);
  if (scale != 1.0) result.mul_(scale);
}

// Both planes and their one failure: shared by the Collectives and its works, which may outlive it.
class Planes {
 public:
  Planes(std::shared_ptr<comm::Collectives> control, std::shared_ptr<GroupBackend> bulk,
         c10::intrusive_ptr<c10d::Store> store, std::string id, comm::RankNames names)
      : control_(std::move(control)),
        bulk_(std::move(bulk)),
        failure_(std::move(store), std::move(id), control_->rank(), control_->world_size(), names) {
  }

  comm::Collectives& control() { return *control_; }
  bool has_bulk() const { return bulk_ != nullptr; }  // false: one rank
  c10d::Backend& bulk() const { return bulk_->get(); }

  void require_usable() const {
    failure_.rethrow();
    if (has_bulk()) static_cast<void>(bulk());
  }
  // The same, and also requires that no peer has posted a failure.
  void require_peers() {
    require_usable();
    if (has_bulk()) failure_.throw_if_a_peer_failed();
    controlled("asking for the peers", [&] { control_->require_usable(); });
  }

  // Calls the control plane; an error there ends this group, too.
  template <typename Call>
  auto controlled(std::string_view what, Call&& call) -> decltype(call()) {
    require_usable();
    try {
      return std::forward<Call>(call)();
    } catch (const CommError& error) {
      const std::string message = fmt::format("{}: {}", what, error.what());
      stop(message);
      failure_.fail_with(message);
    }
  }

  template <typename Call>
  auto guarded(std::string_view what, Call&& call) -> decltype(call()) {
    try {
      return failure_.guarded(what, std::forward<Call>(call));
    } catch (const CommError& error) {
      stop(error.what());
      throw;
    }
  }

  void end(comm::Ending ending, std::string_view reason) noexcept {
    failure_.end(ending, reason);
    control_->end(ending, reason);
    stop(reason);
  }
  void destroyed() noexcept { failure_.destroyed(); }
  void all_left() noexcept {
    failure_.all_left();
    control_->all_left();
  }

 private:
  // Tells peers through the control plane, and ends kernels of the backend that wait for a peer.
  void stop(std::string_view reason) noexcept {
    if (std::exchange(stopped_, true)) return;
    control_->abort(reason);
    if (!bulk_) return;
    try {
      bulk_->get().abort();
    } catch (const std::exception&) {
      return;  // it is broken or was let go
    }
  }

  std::shared_ptr<comm::Collectives> control_;
  std::shared_ptr<GroupBackend> bulk_;
  GroupFailure failure_;
  bool stopped_ = false;
};

// Measures when operations of the backend ran, by the device's clock. Only the backend can reach
// the streams on which it queues them. So a separate stream waits for the same events and records
// the times: an operation begins when its contribution is ready and the operations before it have
// ended.
class GroupClock {
 public:
  // `device`: of `place`; its compute stream is torch's current one.
  GroupClock(c10::Device place, device::Device& device) : place_(place), device_(device) {}

  // Records the time at which all work on the current stream, and everything marked before, is
  // done.
  std::shared_ptr<device::TimedEvent> mark_after_compute() {
    const auto computed = device_.compute_stream().record();
    const c10::StreamGuard guard(stream());
    device_.compute_stream().wait_for(*computed);
    return device_.compute_stream().record_timed();
  }
  std::shared_ptr<device::TimedEvent> mark_after(c10d::Work& work) {
    const c10::StreamGuard guard(stream());
    work.wait();
    return device_.compute_stream().record_timed();
  }

 private:
  c10::Stream stream() {
    if (!stream_) stream_ = pooled_stream(place_);
    return *stream_;
  }

  c10::Device place_;
  device::Device& device_;
  std::optional<c10::Stream> stream_;  // taken at the first mark
};

class DeviceCollectives final : public comm::Collectives {
 public:
  explicit DeviceCollectives(DeviceGroup group)
      : Collectives(group.control->rank(),
                    among(group.bulk ? comm::kBackendTraits : comm::kOneDeviceTraits,
                          group.control->rank(), group.control->world_size())),
        place_(group.place),
        device_(std::move(group.device)),
        planes_(std::make_shared<Planes>(std::move(group.control), std::move(group.bulk),
                                         std::move(group.store), std::move(group.id), group.names)),
        name_(std::move(group.name)),
        names_of_ranks_(group.names) {}
  ~DeviceCollectives() override { planes_->destroyed(); }

  std::string_view name() const override { return name_; }

  std::unique_ptr<comm::SharedBuffer> allocate(std::string name, Bytes bytes) override {
    planes_->require_peers();
    std::shared_ptr<device::Memory> memory = device_->allocate_uncharged(bytes);
    const std::span<std::byte> span = memory->bytes();
    device_->fill_zero(span, device_->compute_stream());
    return std::make_unique<NamedBuffer>(
        std::move(name), names_, std::move(memory), span,
        BufferActions{.before_free = [device = device_] { wait_for_stream(*device); }});
  }

  std::unique_ptr<comm::SharedBuffer> allocate_growing(std::string name, Bytes bytes) override {
    planes_->require_peers();
    std::shared_ptr<device::GrowableMemory> memory;
    try {
      // Charged to a ledger that is not reported: this device belongs to the collectives.
      memory = device_->reserve(bytes, memory::Kind::kWeights);
    } catch (const DeviceError&) {
      return allocate(std::move(name), bytes);  // the driver cannot map pages
    }
    const std::span<std::byte> span{memory->base(), bytes.size()};
    BufferActions actions;
    actions.back = [grown = memory.get()](Bytes wanted) { grown->grow_to(wanted); };
    actions.release = [grown = memory.get()] { grown->release(); };
    actions.before_free = [device = device_] { wait_for_stream(*device); };
    return std::make_unique<NamedBuffer>(std::move(name), names_, std::move(memory), span,
                                         std::move(actions));
  }

  void record_times(bool on) override { records_times_ = on && !place_.is_cpu(); }

  std::unique_ptr<comm::Work> all_gather(const comm::SliceMap& slices, std::span<std::byte> flat,
                                         std::string_view tag) override {
    const comm::BulkOperation gather =
        comm::describe_gather(slices, flat, rank(), world_size(), tag);
    const std::string& what = gather.what;
    const std::span<std::byte> mine = gather.source;
    require_same_operation(what);
    if (mine.empty()) return std::make_unique<GroupWork>();
    if (!planes_->has_bulk()) {
      if (slices.writer != nullptr) device_->compute_stream().wait_for(*slices.writer->record());
      if (mine.data() != flat.data()) device_->copy(flat, mine, device_->compute_stream());
      return std::make_unique<GroupWork>();
    }
    at::Tensor target = bytes_at(flat);
    at::Tensor source = bytes_at(mine);
    // The backend begins after the current stream, so make that one which holds only the writer's
    // work.
    std::optional<c10::StreamGuard> after_writer;
    if (slices.writer != nullptr) {
      after_writer.emplace(bridge());
      device_->compute_stream().wait_for(*slices.writer->record());
    }
    return planes_->guarded(what, [&] {
      return started([&] { return planes_->bulk()._allgather_base(target, source); }, nullptr,
                     what);
    });
  }

  std::unique_ptr<comm::Work> reduce_scatter(const comm::Reduction& reduction,
                                             std::string_view tag) override {
    const comm::BulkOperation reduce = comm::describe_reduction(reduction, world_size(), tag);
    const std::string& what = reduce.what;
    const std::span<std::byte> whole = reduce.source;
    require_same_operation(what);
    if (whole.empty()) return std::make_unique<GroupWork>();
    if (reduction.writer != nullptr)
      device_->compute_stream().wait_for(*reduction.writer->record());
    const auto numel = static_cast<std::int64_t>(reduction.result.size());
    const auto scalar = to_scalar_type(reduction.dtype);
    at::Tensor source = tensor_over(whole.data(), numel * world_size(), scalar, place_);
    // In place: this rank's slice of its own contribution takes the sum.
    at::Tensor sum = source.narrow(0, numel * rank(), numel);
    at::Tensor result = tensor_over(reduction.result.data(), numel, at::kFloat, place_);
    const auto finish = [result, sum, scale = double{reduction.scale},
                         accumulate = reduction.accumulate] {
      fold(result, sum, scale, accumulate);
    };
    if (!planes_->has_bulk()) {
      finish();
      return std::make_unique<GroupWork>();
    }
    return planes_->guarded(what, [&] {
      return started([&] { return planes_->bulk()._reduce_scatter_base(sum, source); }, finish,
                     what);
    });
  }

  void all_reduce(std::span<double> values, comm::ReduceOp op) override {
    require_same_operation(fmt::format("all-reduce of {} values", values.size()));
    planes_->controlled("all-reduce", [&] { planes_->control().all_reduce(values, op); });
  }

  void broadcast(std::span<std::byte> bytes, int root) override {
    const std::string what = comm::describe_broadcast(Bytes(bytes.size()), root, world_size());
    require_same_operation(what);
    if (bytes.empty() || world_size() == 1) return;
    if (!planes_->has_bulk() || device_->host_accessible(bytes.data())) {
      planes_->controlled(what, [&] { planes_->control().broadcast(bytes, root); });
      return;
    }
    std::vector<at::Tensor> tensors{bytes_at(bytes)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    planes_->guarded(what, [&] { return planes_->bulk().broadcast(tensors, options)->wait(); });
  }

  std::vector<std::string> all_gather_text(const std::string& text) override {
    return planes_->controlled("exchange of texts",
                               [&] { return planes_->control().all_gather_text(text); });
  }

  void barrier() override { require_same_operation("barrier"); }

  void announce_departure(std::string_view words) override {
    Collectives::announce_departure(words);
    planes_->control().announce_departure(words);
  }
  void all_left() noexcept override { planes_->all_left(); }

  void require_usable() override { planes_->require_peers(); }

  void end(comm::Ending ending, std::string_view reason) noexcept override {
    planes_->end(ending, reason);
  }

 private:
  static void wait_for_stream(device::Device& device) {
    try {
      device.compute_stream().synchronize();
    } catch (const std::exception&) {
      return;  // a lost device runs nothing
    }
  }

  at::Tensor bytes_at(std::span<const std::byte> bytes) const {
    return tensor_over(bytes.data(), static_cast<std::int64_t>(bytes.size()), at::kByte, place_);
  }

  c10::Stream bridge() {
    if (!bridge_) bridge_ = pooled_stream(place_);
    return *bridge_;
  }

  // Called before sizes and kinds must agree, and before work is queued that only a peer can end.
  void require_same_operation(const std::string& what) {
    planes_->controlled(
        what, [&] { comm::agree_on_operation(planes_->control(), what, names_of_ranks_); });
  }

  template <typename Start>
  std::unique_ptr<GroupWork> started(Start&& start, std::function<void()> finish,
                                     const std::string& what) {
    comm::WorkTimes times;
    if (records_times_) times.begin = clock_.mark_after_compute();
    c10::intrusive_ptr<c10d::Work> work = std::forward<Start>(start)();
    if (records_times_) times.end = clock_.mark_after(*work);
    auto result = std::make_unique<GroupWork>(std::move(work), std::move(finish), failure_of(what));
    result->set_times(std::move(times));
    return result;
  }

  GroupWork::Fail failure_of(const std::string& what) {
    return [planes = planes_, what](const std::string& error) {
      planes->guarded(what, [&] { throw std::runtime_error(error); });
    };
  }

  c10::Device place_;
  std::shared_ptr<device::Device> device_;
  std::shared_ptr<Planes> planes_;
  std::string name_;
  comm::RankNames names_of_ranks_;
  std::shared_ptr<BufferNames> names_ = std::make_shared<BufferNames>();
  GroupClock clock_{place_, *device_};
  std::optional<c10::Stream> bridge_;
  bool records_times_ = false;
};

}  // namespace

std::unique_ptr<comm::Collectives> make_device_collectives(DeviceGroup group) {
  STRATA_ASSERT(group.bulk || group.control->world_size() == 1);
  if (!group.store) group.store = c10::make_intrusive<c10d::HashStore>();
  return std::make_unique<DeviceCollectives>(std::move(group));
}

std::shared_ptr<comm::Collectives> single_rank(c10::Device place,
                                               std::shared_ptr<device::HostWaits> waits) {
  std::shared_ptr<comm::Collectives> host = comm::LocalGroup(1).rank(0);
  if (place.is_cpu()) return host;
  DeviceGroup group;
  group.place = place;
  group.device = make_device(place, 1, std::move(waits));
  group.control = std::move(host);
  group.name = group.control->name();
  return make_device_collectives(std::move(group));
}

}  // namespace strata::torch

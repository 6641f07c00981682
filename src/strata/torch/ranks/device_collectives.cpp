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

class DeviceCollectives final : public comm::Collectives {
 public:
  explicit DeviceCollectives(DeviceGroup group)
      : Collectives(group.control->rank(),
                    among(group.bulk ? comm::kBackendTraits : comm::kOneDeviceTraits,
                          group.control->rank(), group.control->world_size())),
        place_(group.place),
        device_(std::move(group.device)),
        control_(std::move(group.control)),
        bulk_(std::move(group.bulk)),
        failure_(std::make_shared<GroupFailure>(
            std::move(group.store), std::move(group.id), rank(), world_size(), group.names,
            // Tells peers through the control plane, and ends kernels of the backend that wait for
            // one.
            [control = control_, bulk = bulk_](std::string_view reason) {
              control->abort(reason);
              FirstError untold;  // it is broken or was let go
              if (bulk) untold.attempt([&] { bulk->get().abort(); });
            })),
        name_(std::move(group.name)),
        names_of_ranks_(group.names) {}
  ~DeviceCollectives() override { failure_->destroyed(); }

  std::string_view name() const override { return name_; }

  std::unique_ptr<comm::SharedBuffer> allocate(std::string name, Bytes bytes) override {
    require_usable();
    std::shared_ptr<device::Memory> memory = device_->allocate_uncharged(bytes);
    const std::span<std::byte> span = memory->bytes();
    device_->fill_zero(span, device_->compute_stream());
    return buffer(std::move(name), std::move(memory), span);
  }

  std::unique_ptr<comm::SharedBuffer> allocate_growing(std::string name, Bytes bytes) override {
    require_usable();
    std::shared_ptr<device::GrowableMemory> memory;
    try {
      // Charged to a ledger that is not reported: this device belongs to the collectives.
      memory = device_->reserve(bytes, memory::Kind::kWeights);
    } catch (const DeviceError&) {
      return allocate(std::move(name), bytes);  // the driver cannot map pages
    }
    const std::span<std::byte> span{memory->base(), bytes.size()};
    return buffer(std::move(name), memory, span, memory.get());
  }

  void record_times(bool on) override { records_times_ = on && !place_.is_cpu(); }

  std::unique_ptr<comm::Work> all_gather(const comm::SliceMap& slices, std::span<std::byte> flat,
                                         std::string_view tag) override {
    const comm::BulkOperation gather =
        comm::describe_gather(slices, flat, rank(), world_size(), tag);
    const std::span<std::byte> mine = gather.source;
    require_same_operation(gather.what);
    if (mine.empty()) return std::make_unique<GroupWork>();
    if (!bulk_) {
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
      after_writer.emplace(own_stream(bridge_));
      device_->compute_stream().wait_for(*slices.writer->record());
    }
    return failure_->guarded(gather.what, [&] {
      return started([&] { return bulk_->get()._allgather_base(target, source); }, nullptr,
                     gather.what);
    });
  }

  std::unique_ptr<comm::Work> reduce_scatter(const comm::Reduction& reduction,
                                             std::string_view tag) override {
    const comm::BulkOperation reduce = comm::describe_reduction(reduction, world_size(), tag);
    require_same_operation(reduce.what);
    if (reduce.source.empty()) return std::make_unique<GroupWork>();
    if (reduction.writer != nullptr)
      device_->compute_stream().wait_for(*reduction.writer->record());
    const auto numel = static_cast<std::int64_t>(reduction.result.size());
    const auto scalar = to_scalar_type(reduction.dtype);
    at::Tensor source = tensor_over(reduce.source.data(), numel * world_size(), scalar, place_);
    // In place: this rank's slice of its own contribution takes the sum.
    at::Tensor sum = source.narrow(0, numel * rank(), numel);
    at::Tensor result = tensor_over(reduction.result.data(), numel, at::kFloat, place_);
    const auto finish = [result, sum, scale = double{reduction.scale},
                         accumulate = reduction.accumulate] {
      if (accumulate) {
        result.add_(sum, scale);
        return;
      }
      result.copy_(sum);
      if (scale != 1.0) result.mul_(scale);
    };
    if (!bulk_) {
      finish();
      return std::make_unique<GroupWork>();
    }
    return failure_->guarded(reduce.what, [&] {
      return started([&] { return bulk_->get()._reduce_scatter_base(sum, source); }, finish,
                     reduce.what);
    });
  }

  std::unique_ptr<comm::Work> exchange(const comm::Exchange& exchange,
                                       std::string_view tag) override {
    const comm::BulkOperation operation =
        comm::describe_exchange(exchange, rank(), world_size(), tag);
    require_same_operation(operation.what);
    if (exchange.parcels->total() == Bytes()) return std::make_unique<GroupWork>();
    if (!bulk_) {
      device_->copy(exchange.target, operation.source, device_->compute_stream());
      return std::make_unique<GroupWork>();
    }
    at::Tensor target = bytes_at(exchange.target);
    at::Tensor source = bytes_at(operation.source);
    return failure_->guarded(operation.what, [&] {
      return started(
          [&] { return start_exchange(bulk_->get(), target, source, *exchange.parcels); }, nullptr,
          operation.what);
    });
  }

  void all_reduce(std::span<double> values, comm::ReduceOp op) override {
    require_same_operation(fmt::format("all-reduce of {} values", values.size()));
    controlled("all-reduce", [&] { control_->all_reduce(values, op); });
  }

  void broadcast(std::span<std::byte> bytes, int root) override {
    const std::string what = comm::describe_broadcast(Bytes(bytes.size()), root, world_size());
    require_same_operation(what);
    if (bytes.empty() || world_size() == 1) return;
    if (!bulk_ || device_->host_accessible(bytes.data())) {
      controlled(what, [&] { control_->broadcast(bytes, root); });
      return;
    }
    std::vector<at::Tensor> tensors{bytes_at(bytes)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    failure_->guarded(what, [&] { return bulk_->get().broadcast(tensors, options)->wait(); });
  }

  std::vector<std::string> all_gather_text(const std::string& text) override {
    return controlled("exchange of texts", [&] { return control_->all_gather_text(text); });
  }

  void barrier() override { require_same_operation("barrier"); }

  void announce_departure(std::string_view words) override {
    Collectives::announce_departure(words);
    control_->announce_departure(words);
  }
  void all_left() noexcept override {
    failure_->all_left();
    control_->all_left();
  }

  void require_usable() override {
    require_own_planes();
    if (bulk_) failure_->throw_if_a_peer_failed();
    controlled("asking for the peers", [&] { control_->require_usable(); });
  }

  void end(comm::Ending ending, std::string_view reason) noexcept override {
    control_->end(ending, reason);
    failure_->end(ending, reason);
  }

 private:
  void require_own_planes() const {
    failure_->rethrow();
    if (bulk_) static_cast<void>(bulk_->get());
  }

  // Calls the control plane; an error there ends this group, too.
  template <typename Call>
  auto controlled(std::string_view what, Call&& call) -> decltype(call()) {
    require_own_planes();
    try {
      return std::forward<Call>(call)();
    } catch (const CommError& error) {
      failure_->fail_with(fmt::format("{}: {}", what, error.what()));
    }
  }

  std::unique_ptr<comm::SharedBuffer> buffer(std::string name, std::shared_ptr<void> owner,
                                             std::span<std::byte> memory,
                                             device::GrowableMemory* growable = nullptr) {
    const auto finish_uses = [device = device_] {
      FirstError of_lost_device;  // dropped: it runs nothing
      of_lost_device.attempt([&] { device->compute_stream().synchronize(); });
    };
    return std::make_unique<NamedBuffer>(std::move(name), names_, std::move(owner), memory,
                                         finish_uses, growable);
  }

  at::Tensor bytes_at(std::span<const std::byte> bytes) const {
    return tensor_over(bytes.data(), static_cast<std::int64_t>(bytes.size()), at::kByte, place_);
  }

  c10::Stream own_stream(std::optional<c10::Stream>& stream) const {
    if (!stream)
      stream = c10::impl::VirtualGuardImpl(place_.type()).getStreamFromGlobalPool(place_);
    return *stream;
  }

  // The time at which `wait` lets a stream of the clock's own go on, after everything marked
  // before. Only the backend can reach the streams on which it queues operations, so this one waits
  // for the same events: an operation begins when its contribution is ready and the operations
  // before it have ended.
  template <typename Wait>
  std::shared_ptr<device::TimedEvent> mark_after(Wait&& wait) {
    const c10::StreamGuard guard(own_stream(clock_));
    std::forward<Wait>(wait)();
    return device_->compute_stream().record_timed();
  }

  // Called before sizes and kinds must agree, and before work is queued that only a peer can end.
  void require_same_operation(const std::string& what) {
    controlled(what, [&] { comm::agree_on_operation(*control_, what, names_of_ranks_); });
  }

  template <typename Start>
  std::unique_ptr<GroupWork> started(Start&& start, std::function<void()> finish,
                                     const std::string& what) {
    comm::WorkTimes times;
    if (records_times_) {
      const auto computed = device_->compute_stream().record();
      times.begin = mark_after([&] { device_->compute_stream().wait_for(*computed); });
    }
    c10::intrusive_ptr<c10d::Work> work = std::forward<Start>(start)();
    if (records_times_) times.end = mark_after([&] { work->wait(); });
    auto result = std::make_unique<GroupWork>(std::move(work), std::move(finish), failure_, what);
    result->set_times(std::move(times));
    return result;
  }

  c10::Device place_;
  std::shared_ptr<device::Device> device_;
  std::shared_ptr<comm::Collectives> control_;
  std::shared_ptr<GroupBackend> bulk_;     // null: one rank
  std::shared_ptr<GroupFailure> failure_;  // of both planes; works share it, and may outlive this
  std::string name_;
  comm::RankNames names_of_ranks_;
  std::shared_ptr<BufferNames> names_ = std::make_shared<BufferNames>();
  std::optional<c10::Stream> clock_;  // of mark_after(); both are taken at their first use
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
  return make_device_collectives({place, make_device(place, 1, std::move(waits)), host, nullptr,
                                  nullptr, "", std::string(host->name())});
}

}  // namespace strata::torch

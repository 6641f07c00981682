#include "strata/torch/ranks/c10d_collectives.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "strata/comm/agreement.h"
#include "strata/memory/host_buffer.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/base/tensors.h"
#include "strata/torch/ranks/group_work.h"

namespace strata::torch {
namespace {

// c10d takes mutable tensors although it only reads them.
at::Tensor as_tensor(const void* data, std::int64_t numel, c10::ScalarType type) {
  return tensor_over(data, numel, type, c10::kCPU);
}

at::Tensor byte_tensor(std::span<const std::byte> bytes) {
  return as_tensor(bytes.data(), static_cast<std::int64_t>(bytes.size()), at::kByte);
}

class C10dCollectives final : public comm::Collectives {
 public:
  C10dCollectives(std::shared_ptr<GroupBackend> group, c10::intrusive_ptr<c10d::Store> store,
                  const std::string& id, std::string name, comm::RankNames names)
      : Collectives(group->get().getRank(),
                    among(comm::kBackendTraits, group->get().getRank(), group->get().getSize())),
        group_(std::move(group)),
        name_(std::move(name)),
        names_of_ranks_(names),
        failure_(
            std::make_shared<GroupFailure>(std::move(store), id, rank(), world_size(), names)) {}
  ~C10dCollectives() override { failure_->destroyed(); }

  std::string_view name() const override { return name_; }

  std::unique_ptr<comm::SharedBuffer> allocate(std::string name, Bytes bytes) override {
    require_usable();
    auto memory = std::make_shared<memory::HostBuffer>(bytes);
    const std::span<std::byte> span = memory->bytes();
    return std::make_unique<NamedBuffer>(std::move(name), names_, std::move(memory), span);
  }

  std::unique_ptr<comm::Work> all_gather(const comm::SliceMap& slices, std::span<std::byte> flat,
                                         std::string_view tag) override {
    const comm::BulkOperation gather =
        comm::describe_gather(slices, flat, rank(), world_size(), tag);
    require_same_operation(gather.what);
    if (gather.source.empty()) return std::make_unique<GroupWork>();
    if (slices.writer != nullptr) slices.writer->synchronize();
    at::Tensor target = byte_tensor(flat);
    at::Tensor source = byte_tensor(gather.source);
    return failure_->guarded(gather.what, [&] {
      return std::make_unique<GroupWork>(group_->get()._allgather_base(target, source), nullptr,
                                         failure_, gather.what);
    });
  }

  std::unique_ptr<comm::Work> reduce_scatter(const comm::Reduction& reduction,
                                             std::string_view tag) override {
    const comm::BulkOperation reduce = comm::describe_reduction(reduction, world_size(), tag);
    require_same_operation(reduce.what);
    if (reduce.source.empty()) return std::make_unique<GroupWork>();
    const auto numel = static_cast<std::int64_t>(reduction.result.size());
    const auto scalar = to_scalar_type(reduction.dtype);
    at::Tensor source = as_tensor(reduce.source.data(), numel * world_size(), scalar);
    at::Tensor sum = at::empty({numel}, at::TensorOptions().dtype(scalar));
    at::Tensor result = as_tensor(reduction.result.data(), numel, at::kFloat);
    const auto finish = [sum, result, scale = reduction.scale,
                         accumulate = reduction.accumulate]() mutable {
      const at::Tensor scaled = sum.to(at::kFloat).mul_(scale);
      accumulate ? result.add_(scaled) : result.copy_(scaled);
    };
    return failure_->guarded(reduce.what, [&] {
      return std::make_unique<GroupWork>(group_->get()._reduce_scatter_base(sum, source), finish,
                                         failure_, reduce.what);
    });
  }

  std::unique_ptr<comm::Work> exchange(const comm::Exchange& exchange,
                                       std::string_view tag) override {
    const comm::BulkOperation operation =
        comm::describe_exchange(exchange, rank(), world_size(), tag);
    require_same_operation(operation.what);
    if (exchange.parcels->total() == Bytes()) return std::make_unique<GroupWork>();
    at::Tensor target = byte_tensor(exchange.target);
    at::Tensor source = byte_tensor(operation.source);
    return failure_->guarded(operation.what, [&] {
      return std::make_unique<GroupWork>(
          start_exchange(group_->get(), target, source, *exchange.parcels), nullptr, failure_,
          operation.what);
    });
  }

  void all_reduce(std::span<double> values, comm::ReduceOp op) override {
    const auto count = static_cast<std::int64_t>(values.size());
    require_same_operation(fmt::format("all-reduce of {} values", count));
    if (count == 0) return;
    const at::Tensor all = gathered("all-reduce", as_tensor(values.data(), count, at::kDouble));
    const auto* by_rank = all.const_data_ptr<double>();
    for (std::size_t i = 0; i < values.size(); ++i) {
      double result = by_rank[i];
      for (int r = 1; r < world_size(); ++r) {
        const double other = by_rank[static_cast<std::size_t>(r) * values.size() + i];
        result = comm::combine_values(result, other, op);
      }
      values[i] = result;
    }
  }

  void broadcast(std::span<std::byte> bytes, int root) override {
    require_same_operation(comm::describe_broadcast(Bytes(bytes.size()), root, world_size()));
    if (bytes.empty()) return;
    std::vector<at::Tensor> tensors{byte_tensor(bytes)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    failure_->guarded("broadcast",
                      [&] { return group_->get().broadcast(tensors, options)->wait(); });
  }

  std::vector<std::string> all_gather_text(const std::string& text) override {
    require_own_group();
    const auto length = static_cast<std::int64_t>(text.size());
    const at::Tensor lengths = gathered("exchange of texts", as_tensor(&length, 1, at::kLong));
    const auto* by_rank = lengths.const_data_ptr<std::int64_t>();
    const std::int64_t longest =
        std::max<std::int64_t>(1, *std::max_element(by_rank, by_rank + world_size()));
    std::string padded = text;
    padded.resize(static_cast<std::size_t>(longest));
    const at::Tensor all =
        gathered("exchange of texts", as_tensor(padded.data(), longest, at::kByte));
    std::vector<std::string> texts;
    const auto* bytes = reinterpret_cast<const char*>(all.const_data_ptr<std::uint8_t>());
    for (int r = 0; r < world_size(); ++r)
      texts.emplace_back(bytes + r * longest, static_cast<std::size_t>(by_rank[r]));
    return texts;
  }

  void barrier() override { require_same_operation("barrier"); }

  void all_left() noexcept override { failure_->all_left(); }

  void require_usable() override {
    require_own_group();
    failure_->throw_if_a_peer_failed();
  }

  void end(comm::Ending ending, std::string_view reason) noexcept override {
    failure_->end(ending, reason);
  }

 private:
  void require_own_group() const {
    failure_->rethrow();
    static_cast<void>(group_->get());
  }

  // The values of every rank, one after the other.
  at::Tensor gathered(std::string_view what, at::Tensor mine) {
    at::Tensor all = at::empty({mine.numel() * world_size()}, mine.options());
    failure_->guarded(what, [&] { return group_->get()._allgather_base(all, mine)->wait(); });
    return all;
  }

  // Exchanges a few bytes with every rank, before sizes and kinds must agree.
  void require_same_operation(const std::string& what) {
    require_own_group();
    const std::size_t hash = std::hash<std::string>{}(what);
    const at::Tensor all = gathered(what, as_tensor(&hash, 1, at::kLong));
    const auto* hashes = all.const_data_ptr<std::int64_t>();
    if (std::all_of(hashes, hashes + world_size(), [&](auto one) { return one == hashes[0]; }))
      return;
    const std::vector<std::string> whats = all_gather_text(comm::description_of(*this, what));
    failure_->fail_with(comm::different_operations(whats, names_of_ranks_));
  }

  std::shared_ptr<GroupBackend> group_;
  std::string name_;
  comm::RankNames names_of_ranks_;
  std::shared_ptr<GroupFailure> failure_;  // shared with works, which may outlive this
  std::shared_ptr<BufferNames> names_ = std::make_shared<BufferNames>();
};

}  // namespace

std::unique_ptr<comm::Collectives> make_c10d_collectives(std::shared_ptr<GroupBackend> group,
                                                         c10::intrusive_ptr<c10d::Store> store,
                                                         std::string id, std::string name,
                                                         comm::RankNames names) {
  return std::make_unique<C10dCollectives>(std::move(group), std::move(store), id, std::move(name),
                                           names);
}

}  // namespace strata::torch

// A network as NCCL and gloo are, made of ranks that are threads: a gather needs every rank's call.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "strata/comm/collectives.h"

namespace strata::comm::conformance {

class CollectiveNetwork final : public Collectives {
 public:
  explicit CollectiveNetwork(std::unique_ptr<Collectives> ranks) : ranks_(std::move(ranks)) {}

  std::string_view name() const override { return "network"; }
  int rank() const override { return ranks_->rank(); }
  int world_size() const override { return ranks_->world_size(); }
  bool one_sided() const override { return false; }
  bool deterministic() const override { return false; }

  std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) override {
    return ranks_->allocate(std::move(name), bytes);
  }
  std::unique_ptr<Work> all_gather(const SliceMap& slices, std::span<std::byte> flat,
                                   std::string_view tag) override {
    // It carries any memory, not only what it has allocated.
    const Bytes begin = slices.first_offset + slices.stride * rank();
    const auto sent = ranks_->allocate("sent", slices.slice_bytes);
    const auto own = const_cast<SharedBuffer*>(slices.buffer)->local().subspan(begin.size());
    std::ranges::copy(own.first(slices.slice_bytes.size()), sent->local().begin());
    ranks_->barrier();
    auto work = ranks_->all_gather({sent.get(), Bytes(), Bytes(), slices.slice_bytes}, flat, tag);
    ranks_->barrier();
    return work;
  }
  std::unique_ptr<Work> reduce_scatter(const Reduction& reduction, std::string_view tag) override {
    return ranks_->reduce_scatter(reduction, tag);
  }
  void all_reduce(std::span<double> values, ReduceOp op) override {
    ranks_->all_reduce(values, op);
  }
  void broadcast(std::span<std::byte> bytes, int root) override { ranks_->broadcast(bytes, root); }
  std::vector<std::string> all_gather_text(const std::string& text) override {
    return ranks_->all_gather_text(text);
  }
  void barrier() override { ranks_->barrier(); }
  void abort(std::string_view reason) noexcept override { ranks_->abort(reason); }

 private:
  std::unique_ptr<Collectives> ranks_;
};

}  // namespace strata::comm::conformance

// A network as NCCL and gloo are, made of ranks that are threads: a gather needs every rank's call,
// and any memory is carried, not only what it has allocated. May share its ranks with collectives
// that compare what they do in the same way (strata/comm/agreement.h).
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/comm/collectives.h"

namespace strata::comm::conformance {

class CollectiveNetwork : public Collectives {
 public:
  explicit CollectiveNetwork(std::shared_ptr<Collectives> ranks, RankNames names = {})
      : Collectives(ranks->rank(), among(kBackendTraits, ranks->rank(), ranks->world_size())),
        ranks_(std::move(ranks)),
        names_(names) {}

  std::string_view name() const override { return "network"; }

  std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) override {
    return ranks_->allocate(std::move(name), bytes);
  }
  std::unique_ptr<Work> all_gather(const SliceMap& slices, std::span<std::byte> flat,
                                   std::string_view tag) override {
    const BulkOperation gather = describe_gather(slices, flat, rank(), world_size(), tag);
    come_for(gather.what);
    if (slices.writer != nullptr) slices.writer->synchronize();
    auto sent = copied(gather.source);
    ranks_->barrier();
    auto work = ranks_->all_gather({sent.get(), Bytes(), Bytes(), slices.slice_bytes}, flat, tag);
    ranks_->barrier();
    return work;
  }
  std::unique_ptr<Work> reduce_scatter(const Reduction& reduction, std::string_view tag) override {
    const BulkOperation reduce = describe_reduction(reduction, world_size(), tag);
    come_for(reduce.what);
    auto sent = copied(reduce.source);
    Reduction of_sent = reduction;
    of_sent.source = sent.get();
    of_sent.source_offset = Bytes();
    auto work = ranks_->reduce_scatter(of_sent, tag);
    work->wait();  // a network goes on by itself, whatever its ranks wait for
    return work;
  }
  std::unique_ptr<Work> exchange(const Exchange& exchange, std::string_view tag) override {
    const BulkOperation operation = describe_exchange(exchange, rank(), world_size(), tag);
    come_for(operation.what);
    auto sent = copied(operation.source);
    auto work = ranks_->exchange({sent.get(), exchange.target, exchange.parcels}, tag);
    work->wait();
    return work;
  }
  void all_reduce(std::span<double> values, ReduceOp op) override {
    come_for("all-reduce");
    ranks_->all_reduce(values, op);
  }
  void broadcast(std::span<std::byte> bytes, int root) override {
    come_for(describe_broadcast(Bytes(bytes.size()), root, world_size()));
    ranks_->broadcast(bytes, root);
  }
  std::vector<std::string> all_gather_text(const std::string& text) override {
    return ranks_->all_gather_text(text);
  }
  void barrier() override { come_for("barrier"); }
  void announce_departure(std::string_view words) override {
    Collectives::announce_departure(words);
    ranks_->announce_departure(words);
  }

  void require_usable() override { ranks_->require_usable(); }
  void end(Ending ending, std::string_view reason) noexcept override {
    ranks_->end(ending, reason);
  }

 private:
  void come_for(const std::string& what) {
    try {
      agree_on_operation(*ranks_, what, names_);
    } catch (const CommError& error) {
      throw CommError(what + ": " + error.what());
    }
  }

  std::unique_ptr<SharedBuffer> copied(std::span<const std::byte> bytes) {
    auto sent = ranks_->allocate("sent." + std::to_string(sent_++), Bytes(bytes.size()));
    std::ranges::copy(bytes, sent->local().begin());
    return sent;
  }

  std::shared_ptr<Collectives> ranks_;
  RankNames names_;
  int sent_ = 0;  // buffers made by copied(); the same number on every rank
};

}  // namespace strata::comm::conformance

#include "strata/engine/gather/gather_memory.h"

#include <fmt/core.h>

#include <optional>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"

namespace strata::engine {
namespace {

// Goes when nothing that was queued uses it: no kernel of the model, and no gather, since the
// compute stream waits for each gather before the memory is given back.
class GatheredMemory final : public device::Memory {
 public:
  GatheredMemory(device::Device& device, Bytes bytes)
      : device_(device), memory_(device.allocate(bytes, memory::Kind::kGathered)) {}
  ~GatheredMemory() override {
    try {
      device_.compute_stream().synchronize();
    } catch (...) {  // the device has failed: each wait for its work throws that error
    }
  }
  std::span<std::byte> bytes() override { return memory_->bytes(); }

 private:
  device::Device& device_;
  std::unique_ptr<device::Memory> memory_;
};

// For a single rank: the upload of its own shard is the whole gather.
class UploadWork final : public comm::Work {
 public:
  UploadWork(std::unique_ptr<device::Event> uploaded, device::Device& device)
      : uploaded_(std::move(uploaded)), device_(device) {}
  ~UploadWork() override {
    try {
      UploadWork::wait();
    } catch (...) {  // the device has failed: each wait for its work throws that error
    }
  }
  UploadWork(const UploadWork&) = delete;
  UploadWork& operator=(const UploadWork&) = delete;
  bool done() override { return uploaded_ == nullptr || uploaded_->done(); }
  void wait() override {
    if (const auto uploaded = std::exchange(uploaded_, nullptr))
      device_.compute_stream().wait_for(*uploaded);
  }

 private:
  std::unique_ptr<device::Event> uploaded_;  // null: the compute stream waits for it already
  device::Device& device_;
};

}  // namespace

GatherMemory::GatherMemory(device::Device& device, comm::Collectives& collectives)
    : collectives_(collectives),
      ranks_(ranks_of(collectives)),
      pool_([&device](Bytes bytes) { return std::make_unique<GatheredMemory>(device, bytes); }) {}

GatherMemory::Ranks GatherMemory::ranks_of(const comm::Collectives& collectives) {
  const comm::ShardPosition place = collectives.shard_position();
  if (collectives.traits().one_sided || place.held_count() == 1) return Ranks::kNeedNot;
  return place.groups == 1 ? Ranks::kAgree : Ranks::kCannotAgree;
}

GatherMemory::Taken GatherMemory::take(Bytes footprint) {
  if (ranks_ == Ranks::kAgree) return take_together(footprint);
  try {
    return {pool_.acquire(footprint), ""};
  } catch (const OutOfMemoryError& error) {
    return {{}, error.what()};
  }
}

GatherMemory::Taken GatherMemory::take_together(Bytes footprint) {
  if (pool_.has_cached(footprint)) return {pool_.acquire(footprint), ""};
  std::string shortage;
  // Free buffers are freed by all ranks or none: that one rank alone has them would have it make
  // fewer new ones, and miss an agreement.
  for (const bool second : {false, true}) {
    if (second) pool_.trim();
    Pool::Lease lease;
    std::string mine;
    try {
      lease = pool_.acquire_new(footprint);
    } catch (const OutOfMemoryError& error) {
      mine = error.what();
    }
    const std::vector<std::string> all = collectives_.all_gather_text(mine);
    const std::optional<std::size_t> first = comm::first_text(all);
    if (!first) return {std::move(lease), ""};
    shortage = static_cast<int>(*first) == collectives_.rank()
                   ? mine
                   : fmt::format("rank {}: {}", *first, all[*first]);
  }
  pool_.trim();
  return {{}, shortage};
}

std::shared_ptr<device::Memory> GatherMemory::replace(Pool::Lease& lease) {
  try {
    return pool_.replace(lease);
  } catch (const OutOfMemoryError&) {
    return nullptr;
  }
}

void ShardGather::upload(const Unit& unit, std::span<std::byte> own) {
  shards_.for_each(unit.id, Numel(), unit.layout.shard(), offload::Access::kRead,
                   [&](const WeightShards::Piece& piece) {
                     const std::span<std::byte> target = own.subspan(
                         bytes_of(piece.begin, unit.layout.dtype()).size(), piece.bytes.size());
                     watch_.copy(offload::Link::kUp, Bytes(target.size()), *uploads_,
                                 [&] { device_.copy(target, piece.bytes, *uploads_); });
                     if (piece.lease != nullptr) piece.lease->used_in(*uploads_);
                   });
}

std::unique_ptr<comm::Work> ShardGather::start(const Unit& unit, std::span<std::byte> flat) {
  if (!unit.offloaded) return collectives_.all_gather(unit.slices, flat, unit.name());
  if (uploads_ == nullptr) uploads_ = device_.create_stream();
  uploads_->wait_for(*device_.compute_stream().record());
  const comm::ShardPosition place = collectives_.shard_position();
  const std::span<std::byte> own = flat.subspan((unit.layout.shard_bytes() * place.index).size(),
                                                unit.layout.shard_bytes().size());
  try {
    upload(unit, own);
  } catch (const Error& error) {
    // The others are in this gather, or will be.
    collectives_.abort(
        fmt::format("its shard of '{}' cannot be read: {}", unit.name(), error.what()));
    throw;
  }
  if (place.count == 1) return std::make_unique<UploadWork>(uploads_->record(), device_);
  comm::SliceMap slices = unit.slices;
  slices.writer = uploads_.get();
  return collectives_.all_gather(slices, flat, unit.name());
}

}  // namespace strata::engine

#include "strata/engine/gather/shard_gather.h"

#include <fmt/core.h>

#include <utility>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

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

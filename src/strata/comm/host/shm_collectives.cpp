#include "strata/comm/host/shm_collectives.h"

#include <fmt/core.h>

#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/comm/host/pull_collectives.h"
#include "strata/comm/host/rank_process.h"
#include "strata/comm/host/shared_segment.h"

namespace strata::comm {
namespace {

class ShmRankMemory final : public RankMemory {
 public:
  ShmRankMemory(int rank, std::shared_ptr<SharedSegment> segment,
                const std::vector<std::string>& addresses, RankNames names)
      : rank_(rank), segment_(std::move(segment)) {
    for (std::size_t r = 0; r < addresses.size(); ++r) {
      const int peer = static_cast<int>(r);
      peers_.push_back(peer == rank ? nullptr
                                    : std::make_unique<RankProcess>(
                                          names.of(peer), SegmentAddress::from_text(addresses[r])));
    }
  }

  std::string_view name() const override { return "shm"; }
  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(peers_.size()); }

  ControlBlock& control(int rank) override {
    return rank == rank_ ? segment_->header().control : peer(rank).control();
  }

  std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) override {
    return segment_->allocate(std::move(name), bytes);
  }

  std::optional<BufferView> find(int rank, std::uint64_t buffer_id) override {
    return rank == rank_ ? segment_->find(buffer_id) : peer(rank).find(buffer_id);
  }

  std::string why_gone(int rank) override {
    return rank == rank_ ? std::string() : peer(rank).why_gone();
  }

 private:
  RankProcess& peer(int rank) { return *peers_[static_cast<std::size_t>(rank)]; }

  int rank_;
  std::shared_ptr<SharedSegment> segment_;
  std::vector<std::unique_ptr<RankProcess>> peers_;  // null at my own place
};

// A rank that fails takes part in the exchanges all the same, so that every rank gets the error.
void agree_that_all_succeeded(Bootstrap& bootstrap, const std::string& error, RankNames names) {
  agree_all_can(bootstrap.exchange(error), "join through shared memory", names);
}

}  // namespace

std::unique_ptr<Collectives> make_shm_collectives(Bootstrap& bootstrap,
                                                  const CommOptions& options) {
  std::unique_ptr<ShmRankMemory> memory;
  std::shared_ptr<SharedSegment> segment;
  std::string error;
  std::string address;
  try {
    segment = std::make_shared<SharedSegment>(bootstrap.rank());
    address = SegmentAddress::of(*segment).to_text();
  } catch (const Error& caught) {
    error = caught.what();
  }
  const std::vector<std::string> addresses = bootstrap.exchange(address);
  if (error.empty()) {
    try {
      memory = std::make_unique<ShmRankMemory>(bootstrap.rank(), std::move(segment), addresses,
                                               options.names);
    } catch (const Error& caught) {
      error = caught.what();
    }
  }
  agree_that_all_succeeded(bootstrap, error, options.names);
  return make_pull_collectives(std::move(memory), options);
}

}  // namespace strata::comm

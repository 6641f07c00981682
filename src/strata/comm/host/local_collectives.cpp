
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/host/host_collectives.h"
#include "strata/comm/host/rank_link.h"
#include "strata/memory/host_buffer.h"

namespace strata::comm {
namespace {

// The state that one rank shares. The owner's thread adds and removes buffers while peers look them
// up.
struct LocalRank {
  ControlBlock control;
  std::mutex mutex;
  std::unordered_map<std::uint64_t, std::shared_ptr<memory::HostBuffer>> buffers;  // by id
  bool taken = false;
};

}  // namespace

struct LocalGroup::State {
  explicit State(int world_size, const CommOptions& group_options) : options(group_options) {
    for (int r = 0; r < world_size; ++r) ranks.push_back(std::make_unique<LocalRank>());
    if (world_size > 1) options.pool = nullptr;
  }

  LocalRank& at(int rank) { return *ranks[static_cast<std::size_t>(rank)]; }

  CommOptions options;
  std::vector<std::unique_ptr<LocalRank>> ranks;
};

namespace {

class LocalBuffer final : public SharedBuffer {
 public:
  LocalBuffer(std::shared_ptr<LocalGroup::State> state, int rank, std::string name,
              std::shared_ptr<memory::HostBuffer> memory)
      : SharedBuffer(std::move(name)),
        state_(std::move(state)),
        rank_(rank),
        memory_(std::move(memory)) {}

  // Peers that are reading it now keep the memory alive.
  ~LocalBuffer() override {
    LocalRank& owner = state_->at(rank_);
    const std::lock_guard lock(owner.mutex);
    owner.buffers.erase(id_of(name()));
  }

  std::span<std::byte> local() override { return memory_->bytes(); }
  bool releasable() const override { return true; }
  void release() override { memory::give_back_pages(memory_->bytes()); }

 private:
  std::shared_ptr<LocalGroup::State> state_;
  int rank_;
  std::shared_ptr<memory::HostBuffer> memory_;
};

class LocalRankMemory final : public RankMemory {
 public:
  LocalRankMemory(std::shared_ptr<LocalGroup::State> state, int rank)
      : state_(std::move(state)), rank_(rank) {}

  std::string_view name() const override { return "local"; }
  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(state_->ranks.size()); }
  ControlBlock& control(int rank) override { return state_->at(rank).control; }

  std::unique_ptr<SharedBuffer> allocate(std::string name, Bytes bytes) override {
    auto memory = std::make_shared<memory::HostBuffer>(bytes);
    LocalRank& owner = state_->at(rank_);
    const std::lock_guard lock(owner.mutex);
    if (!owner.buffers.emplace(id_of(name), memory).second)
      throw UsageError(
          "a living buffer of this rank has the name already: free it first ('{}', rank {})", name,
          rank_);
    return std::make_unique<LocalBuffer>(state_, rank_, std::move(name), std::move(memory));
  }

  std::optional<BufferView> find(int rank, std::uint64_t buffer_id) override {
    LocalRank& owner = state_->at(rank);
    const std::lock_guard lock(owner.mutex);
    const auto found = owner.buffers.find(buffer_id);
    if (found == owner.buffers.end()) return std::nullopt;
    return BufferView{found->second, found->second->bytes()};
  }

  // A thread that ends destroys its Collectives, which says so itself.
  std::string why_gone(int) override { return {}; }

 private:
  std::shared_ptr<LocalGroup::State> state_;
  int rank_;
};

}  // namespace

LocalGroup::LocalGroup(int world_size, const CommOptions& options) {
  if (world_size < 1) throw UsageError("a group has at least one rank (world size {})", world_size);
  state_ = std::make_shared<State>(world_size, options);
}

LocalGroup::~LocalGroup() = default;

int LocalGroup::world_size() const {
  return static_cast<int>(state_->ranks.size());
}

std::unique_ptr<Collectives> LocalGroup::rank(int rank) {
  if (rank < 0 || rank >= world_size())
    throw UsageError("no such rank (rank {}, world size {})", rank, world_size());
  {
    LocalRank& taken = state_->at(rank);
    const std::lock_guard lock(taken.mutex);
    if (std::exchange(taken.taken, true))
      throw UsageError("each rank of a group can be taken once (rank {})", rank);
  }
  return make_pull_collectives(std::make_unique<LocalRankMemory>(state_, rank), state_->options);
}

}  // namespace strata::comm

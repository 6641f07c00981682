// Whole parameters for an optimizer whose update of an element needs others: rows, norms, the
// matrix. Each trained parameter has one owner among the ranks of a shard group, which has its fp32
// values and its gradient in memory of its own. Masters stay in the shards: a step brings them and
// the gradients to the owners, and sends the new values back. Nothing is rounded on the way, so
// owners see the same bits at every stage and world size.
//
// Owners are a function of the plan, the same on every rank: the largest parameter first, each to
// the rank that owns the fewest elements. Parameters that train later keep the owners of others.
//
// Unit by unit, in windows of a bounded size, each rank sends its elements of a parameter to the
// owner alone, and gets the new ones from it. Ranks of other shard groups repeat the work.
//
// Threads: one thread at a time; bring() and send() are collective within the shard group, in one
// order of units. Ownership: borrows the shards, the collectives and the device. Errors: CommError;
// OutOfMemoryError from prepare(); ConfigError on every rank where ranks plan other owners, or hold
// shards in parts (ShardPosition::parts).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strata/base/interface.h"
#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/optimize/sharded_optimizer.h"

namespace strata::engine {

// ConfigError where ranks hold shards in parts.
void require_undivided_shards(const comm::ShardPosition& place);

class WholeParameters : NonCopyable {
 public:
  struct Options {
    std::string name;       // of memory that ranks share
    bool together = false;  // the first rank of each group owns all
  };
  // Collective.
  WholeParameters(OptimizerShards& shards, comm::Collectives& collectives, device::Device& device,
                  Options options);

  // A parameter that this rank owns. Both are as long as it, on the host if its states are.
  struct Owned {
    std::unique_ptr<device::Memory> memory;
    std::unique_ptr<device::Memory> gradient_memory;
    std::span<std::byte> values;
    std::span<std::byte> gradients;
    std::span<float> weight() const { return floats_of(values); }
    std::span<float> gradient() const { return floats_of(gradients); }
    static std::span<float> floats_of(std::span<std::byte> bytes) {
      return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
    }
  };
  // By parameter. Spans are valid until free().
  const std::map<int, Owned>& owned() const { return owned_; }

  // Finds owners for parameters that train since the last call, and takes the memory.
  void prepare();
  // Frees the memory of owned(), which prepare() takes again.
  void free() { owned_.clear(); }

  enum class Values { kWeights, kGradients };
  // `mine`: the values of this rank's shard, which kernels can read.
  void bring(const Unit& unit, std::span<const std::byte> mine, Values values);
  // The owners' values go to the shards: calls `take` with those of some elements of this rank's
  // shard that belong to one parameter, the first of which is `begin` of the shard. Work that it
  // queues on the compute stream may read them.
  using Take = std::function<void(int param, Numel begin, std::span<const float> values)>;
  void send(const Unit& unit, const Take& take);

 private:
  // Elements of one parameter that lie in one rank's slice.
  struct Piece {
    int param = 0;
    int holder = 0;
    int owner = 0;
    Numel first;  // in the parameter
    Numel at;     // in the holder's slice
    Numel numel;
    Bytes in_source;  // of the holder's parcels
    Bytes in_target;  // of the owner's
  };
  // Some elements of every slice of a unit, on their way to owners.
  struct Window {
    comm::Parcels there;
    std::vector<Piece> pieces;
  };
  void plan_owners();
  void take_buffers();
  Window window_of(const Unit& unit, Numel begin, Numel end) const;
  void for_each_window(const Unit& unit, const std::function<void(const Window&)>& work) const;
  static Bytes bytes(Numel numel) { return bytes_of(numel, DType::kFloat32); }
  template <typename Byte>
  static std::span<Byte> part(std::span<Byte> all, Bytes begin, Numel numel) {
    return all.subspan(begin.size(), bytes(numel).size());
  }
  void copy(std::span<std::byte> target, std::span<const std::byte> source) {
    device_.copy(target, source, device_.compute_stream());
  }

  OptimizerShards& shards_;
  comm::Collectives& collectives_;
  device::Device& device_;
  comm::ShardPosition place_;
  Options options_;
  std::map<int, int> owner_;         // by parameter: a position in the shard group
  std::vector<std::int64_t> loads_;  // by position: elements that it owns
  std::map<int, Owned> owned_;
  Numel window_;                              // elements of a shard that go at once
  int buffers_ = 0;                           // made so far
  memory::Charge charge_;                     // of what the collectives allocate
  std::unique_ptr<comm::SharedBuffer> mine_;  // parcels of this rank's elements; null: none yet
  std::unique_ptr<comm::SharedBuffer> owned_parcels_;  // of elements that it owns
};

}  // namespace strata::engine

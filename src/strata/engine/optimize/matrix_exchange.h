// Brings Muon's matrices to their owners and back, window by window of a MatrixPlan, in bf16. While
// owners compute one window, the next one travels to them, and the results of the one before
// return:
//
//   compute stream   make 0, 1 | matrices 0 | make 2 | matrices 1 | apply 0 | make 3 | ..
//   exchange            there 0 | there 1 ............ | there 2, back 0 .............. | ..
//
// Matrices that stay in place are computed between windows, while the first one is under way.
//
// Memory: of each direction what one window gives and takes, shared, and a workspace in which an
// owner's matrices are whole. Threads: one thread at a time; run() is collective within the shard
// group. Ownership: borrows the collectives and the device. Errors: CommError, OutOfMemoryError; an
// error of orthogonalize() on every rank, when all windows have been exchanged.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "strata/base/interface.h"
#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/optimize/matrix_plan.h"

namespace strata::engine {

// Whole matrices of a parameter on their owner: elements from `begin` on, in bf16, on the device.
struct OwnedMatrices {
  int param = 0;
  Numel begin;
  std::span<std::byte> values;
};

class MatrixExchange : NonCopyable {
 public:
  // `name`: of memory that ranks share.
  MatrixExchange(comm::Collectives& collectives, device::Device& device, std::string name);

  // The plan of the next steps. Frees the memory if it was for another one.
  void set(MatrixPlan plan);
  // Takes the memory that run() uses.
  void prepare();
  void free();

  struct Steps {
    // Whether a run takes part in this step: the same on every rank.
    std::function<bool(const MatrixRun&)> counts;
    // Queues work that writes, or reads, the values of a piece of this rank's slices.
    std::function<void(const MatrixRun&, const MatrixPiece&, std::span<std::byte> values)> make;
    std::function<void(const MatrixRun&, const MatrixPiece&, std::span<const std::byte> values)>
        apply;
    // Replaces the values of matrices that this rank owns. Takes part in no collective.
    std::function<void(std::span<const OwnedMatrices>)> orthogonalize;
  };
  void run(const Steps& steps);

 private:
  // Calls `work` with the pieces that count.
  template <typename Work>
  static void for_each(const MatrixWindow& window, const Steps& steps, const Work& work);
  void begin(const MatrixWindow& window, const Steps& steps);
  void arrive(const MatrixWindow& window, const Steps& steps);
  void send_back(const MatrixWindow& window, const Steps& steps);
  void end(const MatrixWindow& window, const Steps& steps);
  void orthogonalize(const MatrixWindow& window, const Steps& steps);
  void run_in_place(const MatrixWindow& window, const Steps& steps);
  std::span<std::byte> matrix_part(const MatrixWindow& window, const MatrixPiece& piece) const;

  comm::Collectives& collectives_;
  device::Device& device_;
  comm::ShardPosition place_;
  std::string name_;
  MatrixPlan plan_;
  int buffers_ = 0;                              // made so far
  std::optional<memory::Charge> charge_;         // of what the collectives allocate
  std::unique_ptr<comm::SharedBuffer> given_;    // momenta for owners
  std::unique_ptr<comm::SharedBuffer> results_;  // of matrices that this rank owns
  std::unique_ptr<device::Memory> taken_;        // momenta of others
  std::unique_ptr<device::Memory> returned_;     // results of others
  std::unique_ptr<device::Memory> workspace_;
  std::unique_ptr<comm::Work> there_;  // under way; null: none is
  std::unique_ptr<comm::Work> back_;
  FirstError failure_;  // of orthogonalize()
};

}  // namespace strata::engine

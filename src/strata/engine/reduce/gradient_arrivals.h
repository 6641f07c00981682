// The gradients of a backward pass that have come, and the unit that is reduced next.
//
// A unit is complete when all gradients that are expected for it have come. All ranks reduce units
// in one order, each unit as soon as it and those before it are complete, so that the collectives
// match, whatever each rank's autograd did. The first pass expects one gradient of each parameter
// and reduces in the reverse of forward's order. Later passes expect the gradients that came in it,
// in their order on rank 0. If a unit does not become complete, at most `most_waiting` bytes of
// complete units wait for it: then the unit is reduced without the missing gradients.
//
// If several modules use a tile, as with a head that is tied to its embedding, the tile has several
// turns in that order, one for each gradient. Otherwise its first gradient would wait for the last,
// and all tiles with it.
//
// Threads: one thread at a time. Ownership: borrows the units and the collectives. Errors:
// CommError from begin_pass() and end_pass(), which are collectives once each.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/engine/unit/unit.h"

namespace strata::engine {

class GradientArrivals {
 public:
  GradientArrivals(std::span<const Unit> units, comm::Collectives& collectives, Bytes most_waiting);

  // From the next pass on a gradient of this slot is expected: its parameter was frozen. The order
  // is found anew, as in the first pass. `most_waiting`: as the constructor's. The same on every
  // rank.
  void expect(int unit, std::size_t slot, Bytes most_waiting);

  // A backward pass starts. `first_uses`: the units in the order in which forward first used them.
  // Collective in the first pass, and in the next after expect(): rank 0's order counts.
  void begin_pass(std::span<const int> first_uses);
  // All units were reduced in this pass. Collective after the first one.
  void end_pass();

  // A gradient of this slot has come; `unit_bytes`: what its unit's gradients take. True: the unit
  // is complete by it, and was not reduced before.
  bool note(int unit, std::size_t slot, Bytes unit_bytes);
  void record_reduced(int unit);
  bool reduced(int unit) const { return of(unit).turns_over > 0; }  // in this pass
  // Whether the next gradient of this slot is the only one that this pass is known to bring.
  bool only_one_expected(int unit, std::size_t slot) const {
    return of(unit).expected[slot] <= 1 && of(unit).seen[slot] == 0;
  }

  // Takes the next unit of the order: next_ready() if it may be reduced now, next() in any case.
  std::optional<int> next_ready();
  std::optional<int> next();

  // Trainable units in the order of their (first) reduction; the same on every rank.
  const std::vector<int>& order() const { return units_in_order_; }

 private:
  struct Progress {
    std::vector<int> expected;  // gradients by slot in one pass, as learned
    std::vector<int> seen;      // in this pass
    int missing = 0;            // gradients that are expected and have not come
    Bytes waiting;              // its bytes, while it is complete and not reduced
    int turns = 1;              // reductions in one pass
    int turns_over = 0;         // in this pass
  };

  void learn();
  static bool complete(const Progress& p);
  void share_order(std::span<const int> mine);
  Progress& of(int unit) { return progress_[static_cast<std::size_t>(unit)]; }
  const Progress& of(int unit) const { return progress_[static_cast<std::size_t>(unit)]; }

  std::span<const Unit> units_;
  comm::Collectives& collectives_;
  Bytes most_waiting_;
  std::vector<Progress> progress_;   // by unit; of frozen units unused
  std::vector<int> order_;           // of reductions: a unit as often as it has turns
  std::vector<int> units_in_order_;  // each once
  std::vector<int> completion_;      // order of completion in this pass
  std::size_t next_ = 0;             // index into order_ of the next unit to reduce
  Bytes waiting_;                    // of complete units that are not reduced yet, in this pass
  int passes_ = 0;                   // passes that reduced, since the order was found
  bool finds_anew_ = false;          // the order, in the next pass
};

}  // namespace strata::engine

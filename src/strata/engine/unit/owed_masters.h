// Parts of shards that were stored, and whose fp32 masters were not made from them yet. A kernel
// between two copies leaves the link between host and device idle, so masters of many stores are
// made at once (Weights::make_masters()). Threads: one. Errors: none.
#pragma once

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "strata/base/units.h"

namespace strata::engine {

class OwedMasters {
 public:
  struct Range {
    int unit;
    Numel begin, end;  // elements of this rank's shard of the unit
  };

  void add(const Range& range) { ranges_.push_back(range); }

  // Returns all of them, by unit and offset, with neighbours joined; then none is owed any more.
  std::vector<Range> take() {
    std::vector<Range> ranges = std::exchange(ranges_, {});
    std::ranges::sort(ranges, {}, [](const Range& r) { return std::tuple(r.unit, r.begin); });
    std::vector<Range> merged;
    for (const Range& range : ranges) {
      if (!merged.empty() && merged.back().unit == range.unit && range.begin <= merged.back().end) {
        merged.back().end = std::max(merged.back().end, range.end);
      } else {
        merged.push_back(range);
      }
    }
    return merged;
  }

 private:
  std::vector<Range> ranges_;
};

}  // namespace strata::engine

// The memory bandwidth that a simple loop reaches here: the triad a = b + s * c of the STREAM
// benchmark (McCalpin 1995), counted in the same way: three elements of fp32 moved for each result.
// Threads: measure() uses the pool it is given. Owns its three arrays.
#pragma once

#include <cstddef>

#include "page_vector.h"
#include "strata/base/thread_pool.h"

namespace strata::bench {

class Triad {
 public:
  // Arrays of `numel` fp32 elements each.
  Triad(std::size_t numel, ThreadPool& pool);

  // Bytes a second, the best of `rounds` with ordinary and as many with non-temporal stores.
  double measure(int rounds);

 private:
  template <typename Store>
  double seconds_of_one_round(Store store);

  ThreadPool& pool_;
  PageVector a_, b_, c_;
};

}  // namespace strata::bench

#include "strata/comm/host/bulk_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "strata/base/thread_pool.h"

namespace strata::comm {
namespace {

void check_copy(std::size_t bytes, std::size_t target_shift, std::size_t source_shift,
                CopyHint hint, ThreadPool* pool) {
  std::vector<std::byte> source(bytes + source_shift);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 31 >> 3);
  std::vector<std::byte> target(bytes + target_shift + 1, std::byte{0xaa});
  bulk_copy(std::span(target).subspan(target_shift, bytes), std::span(source).subspan(source_shift),
            hint, pool);
  EXPECT_TRUE(std::equal(source.begin() + static_cast<std::ptrdiff_t>(source_shift), source.end(),
                         target.begin() + static_cast<std::ptrdiff_t>(target_shift)));
  EXPECT_EQ(target.back(), std::byte{0xaa});
  EXPECT_TRUE(target_shift == 0 || target[target_shift - 1] == std::byte{0xaa});
}

TEST(BulkCopy, CopiesEverySizeAndAlignmentExactly) {
  ThreadPool pool(2);
  const std::size_t large = std::size_t{3} << 20;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{63}, large, large + 1,
                                  large + 63, large + 65}) {
    for (const std::size_t shift : {0UL, 1UL, 33UL, 64UL}) {
      check_copy(bytes, shift, 0, CopyHint::kInCaches, nullptr);
      check_copy(bytes, shift, 1, CopyHint::kPastCaches, nullptr);
      check_copy(bytes, 3, shift, CopyHint::kPastCaches, &pool);
    }
  }
}

}  // namespace
}  // namespace strata::comm

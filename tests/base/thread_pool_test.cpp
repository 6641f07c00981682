#include "strata/base/thread_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "strata/base/error.h"

namespace strata {
namespace {

using Chunk = std::pair<std::int64_t, std::int64_t>;

std::set<Chunk> chunks_of(ThreadPool& pool, std::int64_t count, std::int64_t grain) {
  std::mutex mutex;
  std::vector<Chunk> seen;
  pool.parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end) {
    const std::lock_guard lock(mutex);
    seen.emplace_back(begin, end);
  });
  std::set<Chunk> distinct(seen.begin(), seen.end());
  EXPECT_EQ(distinct.size(), seen.size()) << "a chunk was run twice";
  return distinct;
}

TEST(ThreadPool, ChunkBoundariesDoNotDependOnTheNumberOfThreads) {
  ThreadPool one(1);
  ThreadPool three(3);
  for (const std::int64_t count : {1, 9, 10, 11, 95, 1000}) {
    const auto expected = chunks_of(one, count, 10);
    EXPECT_EQ(chunks_of(three, count, 10), expected);
    std::int64_t next = 0;
    for (const auto& [begin, end] : expected) {
      EXPECT_EQ(begin, next);
      EXPECT_EQ(begin % 10, 0);
      next = end;
    }
    EXPECT_EQ(next, count);
  }
}

TEST(ThreadPool, NothingIsCalledForAnEmptyRange) {
  ThreadPool pool(2);
  EXPECT_TRUE(chunks_of(pool, 0, 10).empty());
}

TEST(ThreadPool, OneThreadMeansTheCallerAlone) {
  ThreadPool pool(1);
  EXPECT_EQ(pool.threads(), 1);
  pool.parallel_for(100, 7, [caller = std::this_thread::get_id()](std::int64_t, std::int64_t) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
  });
}

TEST(ThreadPool, TheCallerAndEveryWorkerTakePart) {
  ThreadPool pool(3);
  std::latch all_inside(3);  // passes only when three threads are inside a chunk at once
  std::atomic<bool> caller_took_part{false};
  const auto caller = std::this_thread::get_id();
  pool.parallel_for(3, 1, [&](std::int64_t, std::int64_t) {
    if (std::this_thread::get_id() == caller) caller_took_part = true;
    all_inside.arrive_and_wait();
  });
  EXPECT_TRUE(caller_took_part);
}

TEST(ThreadPool, TheFirstExceptionByChunkOrderIsRethrown) {
  ThreadPool pool(3);
  for (int round = 0; round < 200; ++round) {
    try {
      pool.parallel_for(100, 1, [](std::int64_t begin, std::int64_t) {
        if (begin >= 5) throw std::runtime_error(std::to_string(begin));
      });
      FAIL() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "5");
    }
  }
}

TEST(ThreadPool, WorksAgainAfterAnException) {
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    EXPECT_THROW(pool.parallel_for(
                     4, 1, [](std::int64_t, std::int64_t) { throw std::runtime_error("broken"); }),
                 std::runtime_error);
    EXPECT_EQ(chunks_of(pool, 40, 10).size(), 4U);
  }
}

TEST(ThreadPool, ManyShortLoopsLoseNoChunk) {
  ThreadPool pool(4);
  for (std::int64_t round = 0; round < 5000; ++round) {
    std::atomic<std::int64_t> total{0};
    const std::int64_t count = 1 + round % 9;
    pool.parallel_for(count, 1, [&](std::int64_t begin, std::int64_t end) {
      total.fetch_add((end - begin) * (begin + 1), std::memory_order_relaxed);
    });
    ASSERT_EQ(total.load(), count * (count + 1) / 2);
  }
}

TEST(ThreadPool, WritesOfTheBodyAreSeenByTheCaller) {
  ThreadPool pool(3);
  std::vector<std::int64_t> values(10000);
  for (std::int64_t round = 1; round <= 100; ++round) {
    pool.parallel_for(10000, 256, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) values[static_cast<std::size_t>(i)] += i;
    });
    ASSERT_EQ(values[9999], 9999 * round);
  }
}

TEST(ThreadPool, ALoopInsideALoopIsRefusedInsteadOfHanging) {
  for (const int threads : {1, 2}) {
    ThreadPool pool(threads);
    const auto nothing = [](std::int64_t, std::int64_t) {};
    EXPECT_THROW(pool.parallel_for(
                     4, 1, [&](std::int64_t, std::int64_t) { pool.parallel_for(4, 1, nothing); }),
                 InternalError);
  }
}

TEST(ThreadPool, NoThreadAtAllIsRefused) {
  try {
    const ThreadPool pool(0);
    FAIL() << "nothing was thrown";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("at least one thread"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("asked for: 0"));
  }
}

}  // namespace
}  // namespace strata

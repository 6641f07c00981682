// The conformance tests share these: the backend under test, and ways to fill and check bytes.
#pragma once

#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <ostream>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/rank_runners.h"
#include "strata/base/error.h"
#include "strata/comm/collectives.h"

namespace strata::comm::conformance {

// One implementation under test: runs `body` on `world_size` ranks whose Collectives have
// `timeout`.
struct Backend {
  std::string name;
  std::function<std::vector<std::string>(int world_size, std::chrono::milliseconds timeout,
                                         const RankBody& body)>
      run;
};

inline void PrintTo(const Backend& backend, std::ostream* out) {
  *out << backend.name;
}

class ConformanceTest : public testing::TestWithParam<Backend> {
 protected:
  // For bodies that must succeed: they throw when something is not as it should be.
  static void on_ranks(int world_size, const std::function<void(Collectives&)>& body) {
    const auto results = GetParam().run(world_size, std::chrono::seconds(60), [&](Collectives& c) {
      body(c);
      return std::string();
    });
    EXPECT_THAT(results, testing::Each("")) << "world size " << world_size;
  }

  static void on_worlds(const std::function<void(Collectives&)>& body) {
    for (const int world_size : {1, 2, 3, 5}) on_ranks(world_size, body);
  }

  // For bodies that end in a CommError: returns its message, by rank.
  static std::vector<std::string> errors_on_ranks(
      int world_size, const std::function<void(Collectives&)>& body,
      std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
    return GetParam().run(world_size, timeout, [&](Collectives& c) {
      try {
        body(c);
      } catch (const CommError& error) {
        return std::string(error.what());
      }
      return std::string("no error");
    });
  }
};

inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

// The text is made only when it is needed: some checks run for every byte.
template <typename MakeText>
void require_or_say(bool condition, const MakeText& make_text) {
  if (!condition) throw std::runtime_error(make_text());
}

// A byte that depends on all of its coordinates.
inline std::byte pattern(int rank, std::size_t index, int round = 0) {
  const std::size_t mixed = static_cast<std::size_t>(rank + 1) * 131 + index * 7 +
                            (index >> 8) * 13 + static_cast<std::size_t>(round) * 17;
  return static_cast<std::byte>(mixed & 0xff);
}

inline void fill(std::span<std::byte> bytes, int rank, int round = 0) {
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = pattern(rank, i, round);
}

inline void require_pattern(std::span<const std::byte> bytes, int rank, const std::string& what,
                            int round = 0) {
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    require_or_say(bytes[i] == pattern(rank, i, round),
                   [&] { return fmt::format("{}: byte {} is wrong", what, i); });
  }
}

inline std::span<float> floats_of(SharedBuffer& buffer) {
  const std::span<std::byte> bytes = buffer.local();
  return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
}

// Numbers whose sum depends on the order in which they are added.
inline float contribution(int rank, std::size_t index, int round = 0) {
  const float sign = rank % 2 == 0 ? 1.0F : -1.0F;
  return sign * (1.0e4F / static_cast<float>(rank + 1) + 0.001F * static_cast<float>(index + 1)) +
         static_cast<float>(round);
}

inline float sum_by_rank(int world_size, std::size_t index, int round = 0) {
  float sum = contribution(0, index, round);
  for (int r = 1; r < world_size; ++r) sum += contribution(r, index, round);
  return sum;
}

}  // namespace strata::comm::conformance

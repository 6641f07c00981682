// A seeded user of a store that knows the content of every block. It fetches parts of blocks, one
// or several together, in rounds of one order and at random, holds some for a while, writes, adds
// blocks, and compares. With `may_fail` an IoError may come; parts that are leased all the same
// must hold the right bytes. Threads: one.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/offload/state_store.h"

namespace strata::testing {

class RandomWorkload {
 public:
  struct Options {
    Bytes room = 64_KiB;     // most parts of one fetch
    Bytes largest = 40_KiB;  // block
    int operations = 120;
    bool may_fail = false;
  };

  RandomWorkload(offload::StateStore& store, unsigned seed, const Options& options)
      : store_(store), random_(seed), options_(options) {}

  void run() {
    for (int i = 0; i < 3; ++i) attempt([&] { add_block(); });
    make_round();
    for (int i = 0; i < options_.operations && !::testing::Test::HasFailure(); ++i) operate();
    held_.clear();
  }
  int errors() const { return errors_; }

 private:
  struct Held {
    std::vector<offload::Part> parts;
    std::vector<std::unique_ptr<offload::Lease>> leases;
  };
  using Content = std::vector<std::byte>;

  int below(int bound) { return static_cast<int>(random_() % static_cast<unsigned>(bound)); }

  void operate() {
    const int dice = below(40);
    if (dice == 0) {
      attempt([&] { add_block(); });
    } else if (dice == 1) {
      attempt([&] { store_.flush(); });
    } else if (dice == 2) {
      store_.advance();
    } else if (dice == 3) {
      make_round();
    } else if (dice < 8 && !held_.empty()) {
      held_.erase(held_.begin() + below(static_cast<int>(held_.size())));
    } else if (dice < 12) {
      fetch(random_parts());
    } else {
      fetch(round_[next_++ % round_.size()]);
    }
  }

  template <typename Call>
  void attempt(Call&& call) {
    try {
      call();
    } catch (const IoError& error) {
      ++errors_;
      EXPECT_TRUE(options_.may_fail) << error.what();
      EXPECT_NE(std::string(error.what()).find("offset="), std::string::npos) << error.what();
    }
  }

  void add_block() {
    const auto size = static_cast<std::size_t>(below(static_cast<int>(options_.largest.value)));
    const auto block = store_.add("block", Bytes(size), memory::Kind::kOptimizerState);
    ASSERT_EQ(static_cast<std::size_t>(block), contents_.size());
    contents_.emplace_back(size);
  }

  offload::Part random_part(offload::BlockId block) {
    const Bytes size(contents_[static_cast<std::size_t>(block)].size());
    if (below(3) == 0) return {block, 0_B, size};
    const int pages = static_cast<int>((size.value + 4095) / 4096);
    const int first = below(pages + 1);
    const int last = first + below(pages + 1 - first);
    return {block, std::min(4_KiB * first, size), std::min(4_KiB * last, size)};
  }

  std::vector<offload::Part> random_parts() {
    std::vector<offload::Part> parts;
    Bytes room = options_.room;
    for (int i = 1 + below(3); i > 0; --i) {
      offload::Part part = random_part(below(static_cast<int>(contents_.size())));
      // A part that begins at the end of an odd size is none.
      if (part.begin % 4_KiB != 0_B) continue;
      const bool apart =
          std::ranges::none_of(parts, [&](const auto& other) { return other.overlaps(part); });
      const Bytes pages = align_up(part.bytes(), 4_KiB);
      if (!apart || pages > room) continue;
      room -= pages;
      parts.push_back(part);
    }
    return parts;
  }

  void make_round() {
    round_.clear();
    next_ = 0;
    for (int i = 2 + below(8); i > 0; --i) round_.push_back(random_parts());
  }

  bool is_held(const std::vector<offload::Part>& parts) const {
    return std::ranges::any_of(held_, [&](const Held& held) {
      return std::ranges::any_of(held.parts, [&](const offload::Part& of_held) {
        return std::ranges::any_of(parts, [&](const auto& part) { return part.overlaps(of_held); });
      });
    });
  }

  void fetch(const std::vector<offload::Part>& parts) {
    const bool writes = below(4) != 0;
    attempt([&] {
      try {
        auto leases =
            store_.fetch_all(parts, writes ? offload::Access::kReadWrite : offload::Access::kRead);
        EXPECT_FALSE(is_held(parts));
        ASSERT_EQ(leases.size(), parts.size());
        use(parts, leases, writes);
        if (below(5) == 0) held_.push_back({parts, std::move(leases)});
      } catch (const UsageError& error) {
        // Held leases overlap these parts, or take the room.
        EXPECT_FALSE(held_.empty()) << error.what();
      }
    });
  }

  void use(const std::vector<offload::Part>& parts,
           const std::vector<std::unique_ptr<offload::Lease>>& leases, bool writes) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto bytes = leases[i]->bytes();
      ASSERT_EQ(Bytes(bytes.size()), parts[i].bytes());
      Content& content = contents_[static_cast<std::size_t>(parts[i].block)];
      const auto expected = content.begin() + static_cast<std::ptrdiff_t>(parts[i].begin.value);
      ASSERT_TRUE(std::equal(bytes.begin(), bytes.end(), expected))
          << "block " << parts[i].block << " from " << parts[i].begin.value;
      if (!writes) continue;
      std::ranges::generate(bytes, [&, value = random_()]() mutable {
        return static_cast<std::byte>((value = value * 1664525U + 1013904223U) >> 24U);
      });
      std::ranges::copy(bytes, expected);
    }
  }

  offload::StateStore& store_;
  std::mt19937 random_;
  const Options options_;
  std::vector<Content> contents_;  // by block
  std::vector<std::vector<offload::Part>> round_;
  std::size_t next_ = 0;
  std::vector<Held> held_;
  int errors_ = 0;
};

}  // namespace strata::testing

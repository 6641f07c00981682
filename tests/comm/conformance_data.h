// Conformance: bytes and numbers arrive where they should.
#pragma once

#include <cmath>
#include <memory>
#include <numeric>

#include "comm/conformance_ranks.h"

namespace strata::comm::conformance {

class CollectivesMoveData : public ConformanceTest {};

TEST_P(CollectivesMoveData, GathersTheSliceOfEveryRank) {
  on_worlds([](Collectives& c) {
    for (const std::size_t bytes : {0UL, 1UL, 17UL, 4096UL, 100'003UL, (1UL << 20) + 77}) {
      auto buffer = c.allocate("weights", Bytes(bytes + 5));
      fill(buffer->local(), c.rank());
      c.barrier();
      std::vector<std::byte> flat(bytes * static_cast<std::size_t>(c.world_size()));
      c.all_gather({buffer.get(), 5_B, 0_B, Bytes(bytes)}, flat, "weights")->wait();
      for (int r = 0; r < c.world_size(); ++r) {
        for (std::size_t i = 0; i < bytes; ++i) {
          require_or_say(flat[static_cast<std::size_t>(r) * bytes + i] == pattern(r, i + 5),
                         [&] { return fmt::format("{} bytes: byte {} of rank {}", bytes, i, r); });
        }
      }
      c.barrier();
    }
  });
}

TEST_P(CollectivesMoveData, GathersInPlaceWhereEveryRankHoldsTheWhole) {
  on_worlds([](Collectives& c) {
    const std::size_t bytes = 40'001;
    const auto world = static_cast<std::size_t>(c.world_size());
    auto whole = c.allocate("whole", Bytes(bytes * world));
    const auto mine = static_cast<std::size_t>(c.rank()) * bytes;
    fill(whole->local().subspan(mine, bytes), c.rank());
    c.barrier();
    c.all_gather({whole.get(), 0_B, Bytes(bytes), Bytes(bytes)}, whole->local(), "whole")->wait();
    for (int r = 0; r < c.world_size(); ++r) {
      require_pattern(whole->local().subspan(static_cast<std::size_t>(r) * bytes, bytes), r,
                      "in place");
    }
    c.barrier();
  });
}

TEST_P(CollectivesMoveData, GathersWhatEveryRankHasPutInPlace) {
  on_worlds([](Collectives& c) {
    if (c.traits().one_sided || c.shard_position().groups > 1) return;
    const auto world = static_cast<std::size_t>(c.world_size());
    int round = 0;
    for (const std::size_t bytes : {17UL, 4096UL, 0UL, 100'003UL, 1UL, 5000UL, 5000UL}) {
      std::vector<std::byte> flat(bytes * world);
      const auto mine = static_cast<std::size_t>(c.rank()) * bytes;
      fill(std::span(flat).subspan(mine, bytes), c.rank(), ++round);
      c.all_gather({nullptr, 0_B, 0_B, Bytes(bytes)}, flat, "in place")->wait();
      for (std::size_t r = 0; r < world; ++r) {
        require_pattern(std::span(flat).subspan(r * bytes, bytes), static_cast<int>(r), "in place",
                        round);
      }
    }
    c.barrier();  // a rank that is done may hold memory that others read
  });
}

TEST_P(CollectivesMoveData, SharedBuffersStartZeroedAndAlignedToPages) {
  on_ranks(2, [](Collectives& c) {
    for (const std::size_t bytes : {0UL, 3UL, 70'000UL}) {
      auto buffer = c.allocate("fresh", Bytes(bytes));
      require(buffer->local().size() == bytes && buffer->name() == "fresh", "size and name");
      require(reinterpret_cast<std::uintptr_t>(buffer->local().data()) % 4096 == 0, "alignment");
      for (const std::byte b : buffer->local()) require(b == std::byte{0}, "zeroed");
      fill(buffer->local(), c.rank());
      c.barrier();
    }
  });
}

// A script may hold views of weights when the engine and its ranks' collectives have ended.
TEST_P(CollectivesMoveData, BuffersOutliveTheirCollectives) {
  std::vector<std::unique_ptr<SharedBuffer>> kept(3);  // of ranks that are threads
  on_ranks(3, [&](Collectives& c) {
    auto buffer = c.allocate("kept", 8_KiB);
    fill(buffer->local(), c.rank());
    kept[static_cast<std::size_t>(c.rank())] = std::move(buffer);
    c.barrier();
  });
  for (std::size_t rank = 0; rank < kept.size(); ++rank) {
    if (kept[rank] == nullptr) continue;  // it lived in a process
    require_pattern(kept[rank]->local(), static_cast<int>(rank), "kept");
    kept[rank].reset();
  }
}

TEST_P(CollectivesMoveData, ReadsTheNewBufferAfterOneWasFreedAndAnotherGotItsName) {
  on_ranks(3, [](Collectives& c) {
    for (int round = 0; round < 6; ++round) {
      const std::size_t bytes = 5000 + 3000 * static_cast<std::size_t>(round % 3);
      auto buffer = c.allocate("reused", Bytes(bytes));
      fill(buffer->local(), c.rank(), round);
      c.barrier();
      std::vector<std::byte> flat(3 * bytes);
      c.all_gather({buffer.get(), 0_B, 0_B, Bytes(bytes)}, flat, "reused")->wait();
      for (int r = 0; r < 3; ++r) {
        require_pattern(std::span(flat).subspan(static_cast<std::size_t>(r) * bytes, bytes), r,
                        "reused", round);
      }
      c.barrier();
    }
  });
}

inline void check_reduction(Collectives& c, std::size_t numel, float scale, bool accumulate) {
  const auto world = static_cast<std::size_t>(c.world_size());
  auto source = c.allocate("gradients", Bytes(numel * world * 4 + 8));
  const std::span<float> values = floats_of(*source).subspan(2);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = contribution(c.rank(), i);
  std::vector<float> result(numel, 3.0F);
  c.reduce_scatter({source.get(), 8_B, DType::kFloat32, result, scale, accumulate}, "gradients")
      ->wait();
  for (std::size_t i = 0; i < numel; ++i) {
    const std::size_t at = static_cast<std::size_t>(c.rank()) * numel + i;
    const float sum = scale * sum_by_rank(c.world_size(), at);
    const float wanted = accumulate ? 3.0F + sum : sum;
    const float slack = c.traits().deterministic && scale == 1.0F && !accumulate ? 0.0F : 0.02F;
    require_or_say(std::abs(result[i] - wanted) <= slack, [&] {
      return fmt::format("element {} of {}: {} instead of {}", i, numel, result[i], wanted);
    });
  }
}

TEST_P(CollectivesMoveData, ReducesEveryRanksContribution) {
  on_worlds([](Collectives& c) {
    for (const std::size_t numel : {0UL, 1UL, 17UL, 1000UL, 70'001UL}) {
      check_reduction(c, numel, 1.0F, false);
      check_reduction(c, numel, 0.25F, false);
      check_reduction(c, numel, 0.5F, true);
    }
  });
}

TEST_P(CollectivesMoveData, ReducesSixteenBitContributionsInSinglePrecision) {
  on_worlds([](Collectives& c) {
    const std::size_t numel = 100;
    const auto world = static_cast<std::size_t>(c.world_size());
    auto source = c.allocate("gradients", Bytes(numel * world * 2));
    // 1.0 in bfloat16; on rank 0 256.0, next to which bfloat16 has no room for a 1.
    const std::uint16_t value = c.rank() == 0 ? 0x4380 : 0x3f80;
    for (std::size_t i = 0; i < numel * world; ++i) {
      std::memcpy(source->local().data() + 2 * i, &value, 2);
    }
    std::vector<float> result(numel);
    c.reduce_scatter({source.get(), 0_B, DType::kBFloat16, result, 1.0F, false}, "bf16")->wait();
    const float wanted = 256.0F + static_cast<float>(c.world_size() - 1);
    for (const float x : result) {
      if (c.traits().deterministic)
        require_or_say(x == wanted, [&] { return fmt::format("{} instead of {}", x, wanted); });
    }
  });
}

TEST_P(CollectivesMoveData, StartsManyReductionsBeforeTheFirstIsWaitedFor) {
  on_worlds([](Collectives& c) {
    constexpr int kReductions = 150;
    const auto world = static_cast<std::size_t>(c.world_size());
    auto source = c.allocate("many", Bytes(kReductions * world * 4));
    for (std::size_t i = 0; i < kReductions * world; ++i) {
      floats_of(*source)[i] = contribution(c.rank(), i);
    }
    std::vector<float> results(kReductions);
    std::vector<std::unique_ptr<Work>> works;
    for (std::size_t i = 0; i < kReductions; ++i) {
      works.push_back(c.reduce_scatter({source.get(), Bytes(i * world * 4), DType::kFloat32,
                                        std::span(results).subspan(i, 1), 1.0F, false},
                                       fmt::format("unit {}", i)));
    }
    for (auto work = works.rbegin(); work != works.rend(); ++work) (*work)->wait();
    for (std::size_t i = 0; i < kReductions; ++i) {
      require(works[i]->done(), "done after wait");
      const float wanted =
          sum_by_rank(c.world_size(), i * world + static_cast<std::size_t>(c.rank()));
      require(std::abs(results[i] - wanted) <= (c.traits().deterministic ? 0.0F : 0.02F), "value");
    }
  });
}

TEST_P(CollectivesMoveData, LeavesTheSourceFreeToChangeAfterTheWait) {
  on_ranks(3, [](Collectives& c) {
    const std::size_t numel = 2000;
    auto source = c.allocate("changing", Bytes(3 * numel * 4));
    std::vector<float> result(numel);
    for (int round = 0; round < 50; ++round) {
      for (std::size_t i = 0; i < 3 * numel; ++i) {
        floats_of(*source)[i] = contribution(c.rank(), i, round);
      }
      c.reduce_scatter({source.get(), 0_B, DType::kFloat32, result, 1.0F, false}, "changing")
          ->wait();
      for (std::size_t i = 0; i < numel; ++i) {
        const std::size_t at = static_cast<std::size_t>(c.rank()) * numel + i;
        require_or_say(std::abs(result[i] - sum_by_rank(3, at, round)) <= 0.02F,
                       [&] { return fmt::format("round {} element {}", round, i); });
      }
    }
  });
}

// Sizes differ, also by direction; some are zero.
inline Parcels uneven_parcels(int ranks, std::size_t unit) {
  Parcels parcels(ranks);
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to)
      parcels.add(from, to, Bytes(unit * static_cast<std::size_t>((from * 2 + to * 3) % 5)));
  }
  return parcels;
}

inline void fill_parcels(SharedBuffer& source, const Parcels& parcels, int from, int round) {
  for (int to = 0; to < parcels.ranks(); ++to) {
    fill(source.local().subspan(parcels.in_source(from, to).size(), parcels.at(from, to).size()),
         from * 16 + to, round);
  }
}

inline void require_parcels(std::span<const std::byte> target, const Parcels& parcels, int to,
                            int round) {
  for (int from = 0; from < parcels.ranks(); ++from) {
    require_pattern(target.subspan(parcels.in_target(from, to).size(), parcels.at(from, to).size()),
                    from * 16 + to, "parcel", round);
  }
}

TEST_P(CollectivesMoveData, ExchangesAParcelBetweenEachTwoRanks) {
  on_worlds([](Collectives& c) {
    const ShardPosition& place = c.shard_position();
    if (place.parts > 1) return;
    for (const std::size_t unit : {0UL, 1UL, 17UL, 4096UL, 100'003UL}) {
      const Parcels parcels = uneven_parcels(place.count, unit);
      const Parcels back = parcels.reversed();
      auto source = c.allocate("parcels", parcels.sent(place.index) + 5_B);
      auto received = c.allocate("received", parcels.received(place.index));
      std::vector<std::byte> returned(parcels.sent(place.index).size());
      for (int round = 0; round < 3; ++round) {
        fill_parcels(*source, parcels, place.index, round);
        c.exchange({source.get(), received->local(), &parcels}, "there")->wait();
        require_parcels(received->local(), parcels, place.index, round);
        fill_parcels(*source, parcels, place.index, round + 1);  // it was read by all
        c.exchange({received.get(), returned, &back}, "back")->wait();
        fill_parcels(*source, parcels, place.index, round);
        require(std::ranges::equal(source->local().first(returned.size()), returned), "returned");
      }
      c.barrier();
    }
  });
}

TEST_P(CollectivesMoveData, StartsExchangesAndReductionsBeforeTheFirstIsWaitedFor) {
  on_ranks(3, [](Collectives& c) {
    const ShardPosition& place = c.shard_position();
    if (place.parts > 1 || place.groups > 1) return;
    const Parcels parcels = uneven_parcels(place.count, 1000);
    std::vector<std::unique_ptr<SharedBuffer>> sources;
    std::vector<std::vector<std::byte>> targets(4);
    std::vector<std::unique_ptr<Work>> works;
    auto gradients = c.allocate("gradients", 12_B);
    for (float& x : floats_of(*gradients)) x = 1.0F;
    float sum = 0.0F;
    for (int i = 0; i < 4; ++i) {
      auto& target = targets[static_cast<std::size_t>(i)];
      target.resize(parcels.received(place.index).size());
      sources.push_back(c.allocate(fmt::format("parcels {}", i), parcels.sent(place.index)));
      fill_parcels(*sources.back(), parcels, place.index, i);
      works.push_back(c.exchange({sources.back().get(), target, &parcels}, "many"));
      if (i == 1)
        works.push_back(c.reduce_scatter(
            {gradients.get(), 0_B, DType::kFloat32, std::span(&sum, 1), 1.0F, false}, "between"));
    }
    for (auto work = works.rbegin(); work != works.rend(); ++work) (*work)->wait();
    for (int i = 0; i < 4; ++i)
      require_parcels(targets[static_cast<std::size_t>(i)], parcels, place.index, i);
    require(sum == 3.0F, "sum");
    c.barrier();
  });
}

TEST_P(CollectivesMoveData, FinishesAReductionWhileAnotherRankIsInABarrier) {
  on_ranks(3, [](Collectives& c) {
    auto source = c.allocate("crossing", 12_B);
    for (float& x : floats_of(*source)) x = 1.0F;
    float result = 0;
    auto work = c.reduce_scatter(
        {source.get(), 0_B, DType::kFloat32, std::span(&result, 1), 1.0F, false}, "crossing");
    if (c.rank() == 0) work->wait();  // needs the other ranks, which are in the barrier
    c.barrier();
    work->wait();
    require(result == 3.0F, "sum");
  });
}

TEST_P(CollectivesMoveData, ReducesDoublesToTheSameBitsOnEveryRank) {
  on_worlds([](Collectives& c) {
    for (const std::size_t count : {0UL, 1UL, 7UL, 20'000UL}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax}) {
        std::vector<double> values(count);
        for (std::size_t i = 0; i < count; ++i) values[i] = double{contribution(c.rank(), i)} / 3;
        c.all_reduce(values, op);
        for (std::size_t i = 0; i < count; ++i) {
          double wanted = double{contribution(0, i)} / 3;
          for (int r = 1; r < c.world_size(); ++r) {
            const double theirs = double{contribution(r, i)} / 3;
            wanted = op == ReduceOp::kSum   ? wanted + theirs
                     : op == ReduceOp::kMin ? std::min(wanted, theirs)
                                            : std::max(wanted, theirs);
          }
          require_or_say(values[i] == wanted,
                         [&] { return fmt::format("value {} of {}", i, count); });
        }
      }
    }
  });
}

TEST_P(CollectivesMoveData, ExchangesValuesOnTheDeviceWhereItSaysSo) {
  on_worlds([](Collectives& c) {
    if (!c.traits().gathers_on_device) return;
    for (int repeat = 0; repeat < 5; ++repeat) {
      for (const std::size_t bytes : {8UL, Collectives::kOnDeviceMost}) {
        std::vector<std::byte> mine(bytes);
        std::vector<std::byte> all(bytes * static_cast<std::size_t>(c.world_size()));
        fill(mine, c.rank() + repeat);
        c.all_gather_on_device(all, mine);
        for (int r = 0; r < c.world_size(); ++r) {
          require_pattern(std::span(all).subspan(static_cast<std::size_t>(r) * bytes, bytes),
                          r + repeat, "exchange");
        }
      }
    }
  });
}

TEST_P(CollectivesMoveData, BroadcastsFromEveryRoot) {
  on_worlds([](Collectives& c) {
    for (int root = 0; root < c.world_size(); ++root) {
      for (const std::size_t bytes : {0UL, 1UL, 200'001UL, 700'001UL}) {
        std::vector<std::byte> data(bytes);
        if (c.rank() == root) fill(data, root);
        c.broadcast(data, root);
        require_pattern(data, root, "broadcast");
      }
    }
  });
}

TEST_P(CollectivesMoveData, ExchangesTextsOfDifferentLength) {
  on_worlds([](Collectives& c) {
    const auto text_of = [](int rank) {
      const std::size_t length = rank == 0 ? 0 : static_cast<std::size_t>(rank) * 70'000 + 3;
      return std::string(length, static_cast<char>('a' + rank));
    };
    for (int repeat = 0; repeat < 3; ++repeat) {
      const std::vector<std::string> texts = c.all_gather_text(text_of(c.rank()));
      require(texts.size() == static_cast<std::size_t>(c.world_size()), "number of texts");
      for (int r = 0; r < c.world_size(); ++r) {
        require_or_say(texts[static_cast<std::size_t>(r)] == text_of(r),
                       [&] { return fmt::format("text of {}", r); });
      }
    }
  });
}

}  // namespace strata::comm::conformance

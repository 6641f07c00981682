// Speed of the kernels over arrays far larger than the caches. Every case ends with a STREAM triad
// on the same threads, so that its bandwidth can be compared with the machine's at that moment:
// `of_triad` is the fraction. Bytes are those that an element needs: bytes read plus bytes written.
//   bench_kernels --benchmark_format=json   the same numbers for scripts
//   STRATA_BENCH_NUMEL=8388608              elements of each array (the default)
//   STRATA_BENCH_THREADS=16                 besides 1 and 2 threads
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "page_vector.h"
#include "strata/kernels/elementwise.h"
#include "strata/kernels/fingerprint.h"
#include "strata/kernels/grad_stats.h"
#include "strata/kernels/update.h"
#include "triad.h"

namespace strata::bench {
namespace {

using kernels::UpdateSpans;

constexpr int kTriadRounds = 50;

std::size_t numel() {
  const char* const text = std::getenv("STRATA_BENCH_NUMEL");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : std::size_t{1} << 23;
}

std::byte* bytes_at(PageVector& array) {
  return std::as_writable_bytes(std::span(array)).data();
}

// As in STREAM, both rates are those of the fastest round: other processes slow single rounds.
template <typename Call>
void measure(benchmark::State& state, double bytes_an_element, Call&& call) {
  ThreadPool pool(static_cast<int>(state.range(0)));
  call(pool);  // touches every page
  double best = std::numeric_limits<double>::infinity();
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    call(pool);
    const auto stop = std::chrono::steady_clock::now();
    const double seconds = std::chrono::duration<double>(stop - start).count();
    state.SetIterationTime(seconds);
    best = std::min(best, seconds);
  }
  const double rate = static_cast<double>(numel()) / best;
  const double triad = Triad(numel(), pool).measure(kTriadRounds);
  state.counters["elements/s"] = rate;
  state.counters["GB/s"] = rate * bytes_an_element * 1e-9;
  state.counters["triad_GB/s"] = triad * 1e-9;
  state.counters["of_triad"] = rate * bytes_an_element / triad;
}

void adam(benchmark::State& state, bool with_copy, DType copy) {
  PageVector weight(numel(), 0.02F);
  PageVector exp_avg(numel(), 1e-3F);
  PageVector exp_avg_sq(numel(), 1e-6F);
  PageVector gradient(numel(), 1e-3F);
  PageVector weight16(with_copy ? numel() / 2 + 1 : 0);
  const UpdateSpans spans{
      weight, exp_avg, exp_avg_sq, gradient, with_copy ? bytes_at(weight16) : nullptr, copy};
  measure(state, with_copy ? 30.0 : 28.0, [&](ThreadPool& pool) {
    kernels::update_step(spans, {.weight_decay = 0.1, .step = 10}, &pool);
  });
}

void adam_with_remainder(benchmark::State& state) {
  PageVector exp_avg(numel(), 1e-3F);
  PageVector exp_avg_sq(numel(), 1e-6F);
  PageVector gradient(numel(), 1e-3F);
  PageVector weight16(numel() / 2 + 1, 0.02F);
  PageVector rest(numel() * 17 / 32 + 1);
  UpdateSpans spans{{}, exp_avg, exp_avg_sq, gradient, bytes_at(weight16), DType::kBFloat16};
  spans.remainder = {reinterpret_cast<std::uint16_t*>(rest.data()),
                     reinterpret_cast<std::uint8_t*>(rest.data()) + 2 * numel()};
  measure(state, 28.25, [&](ThreadPool& pool) {
    kernels::update_step(spans, {.weight_decay = 0.1, .step = 10}, &pool);
  });
}

void adam_with_states8(benchmark::State& state) {
  PageVector gradient(numel(), 1e-3F);
  PageVector weight16(numel() / 2 + 1, 0.02F);
  PageVector rest(numel() * 17 / 32 + 1);
  PageVector codes(numel() / 2 + 128);
  PageVector scales(kernels::blocks8(numel()) * 2);
  UpdateSpans spans{{}, {}, {}, gradient, bytes_at(weight16), DType::kBFloat16};
  spans.remainder = {reinterpret_cast<std::uint16_t*>(rest.data()),
                     reinterpret_cast<std::uint8_t*>(rest.data()) + 2 * numel()};
  auto* const first = reinterpret_cast<std::uint8_t*>(codes.data());
  spans.states8 = {{first, scales.data()},
                   {first + numel(), scales.data() + kernels::blocks8(numel())}};
  measure(state, 16.3, [&](ThreadPool& pool) {
    kernels::update_step(spans, {.weight_decay = 0.1, .step = 10}, &pool);
  });
}

void cast(benchmark::State& state, DType to, DType from) {
  PageVector source(numel(), 1.0F);
  PageVector target(numel());
  const auto width = static_cast<double>((size_of(to) + size_of(from)).value);
  measure(state, width, [&](ThreadPool& pool) {
    kernels::cast(bytes_at(target), to, bytes_at(source), from, Numel(numel()), &pool);
  });
}

void accumulate(benchmark::State& state, DType from) {
  PageVector source(numel(), 1e-3F);
  PageVector target(numel());
  measure(state, 8.0 + static_cast<double>(size_of(from).value), [&](ThreadPool& pool) {
    kernels::accumulate(bytes_at(target), DType::kFloat32, bytes_at(source), from, Numel(numel()),
                        &pool);
  });
}

void sum_in_order(benchmark::State& state, DType from, std::size_t world) {
  std::vector<PageVector> arrays(world, PageVector(numel(), 1e-3F));
  std::vector<const std::byte*> sources;
  for (auto& array : arrays) sources.push_back(bytes_at(array));
  PageVector target(numel());
  const double read = static_cast<double>(size_of(from).value) * static_cast<double>(world);
  measure(state, 4.0 + read, [&](ThreadPool& pool) {
    kernels::sum_in_order(target, sources, from, 0.5F, false, &pool);
  });
}

void sum_of_squares(benchmark::State& state) {
  PageVector gradient(numel(), 1e-3F);
  measure(state, 4.0, [&](ThreadPool& pool) {
    auto sum = kernels::sum_of_squares(gradient, &pool);
    benchmark::DoNotOptimize(sum);
  });
}

// In blocks, as a start does; a page touched twice would be in the cache.
template <typename Call>
void each_block(ThreadPool& pool, std::size_t bytes, Call&& call) {
  constexpr std::size_t kBlock = std::size_t{1} << 20;
  pool.parallel_for(
      static_cast<std::int64_t>(bytes / kBlock), 1, [&](std::int64_t begin, std::int64_t end) {
        for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i)
          call(i * kBlock, kBlock);
      });
}

void fingerprint(benchmark::State& state) {
  PageVector source(numel(), 1e-3F);
  const std::span<const std::byte> bytes(bytes_at(source), numel() * sizeof(float));
  measure(state, 4.0, [&](ThreadPool& pool) {
    each_block(pool, bytes.size(), [&](std::size_t at, std::size_t count) {
      auto sums = kernels::fingerprint(bytes.subspan(at, count), nullptr);
      benchmark::DoNotOptimize(sums);
    });
  });
}

void copy(benchmark::State& state, bool with_fingerprint) {
  PageVector source(numel(), 1e-3F);
  PageVector target(numel());
  const std::span<const std::byte> bytes(bytes_at(source), numel() * sizeof(float));
  measure(state, 8.0, [&](ThreadPool& pool) {
    each_block(pool, bytes.size(), [&](std::size_t at, std::size_t count) {
      if (with_fingerprint) {
        auto sums = kernels::fingerprint_and_copy(bytes_at(target) + at, bytes.subspan(at, count));
        benchmark::DoNotOptimize(sums);
      } else {
        std::memcpy(bytes_at(target) + at, bytes.data() + at, count);
      }
    });
  });
}

template <typename Function, typename... Arguments>
void add(const std::string& name, Function function, Arguments... arguments) {
  auto* const cases = benchmark::RegisterBenchmark(
      name.c_str(), [=](benchmark::State& state) { function(state, arguments...); });
  cases->ArgName("threads")->Arg(1)->Arg(2);
  if (const char* const text = std::getenv("STRATA_BENCH_THREADS")) {
    if (const int threads = std::atoi(text); threads > 2) cases->Arg(threads);
  }
  cases->MinTime(1.0)->UseManualTime()->Unit(benchmark::kMillisecond);
}

void add_all() {
  constexpr DType kFp32 = DType::kFloat32;
  add("adam_step", adam, false, DType::kBFloat16);
  add("adam_step/bf16_copy", adam, true, DType::kBFloat16);
  add("adam_step/fp16_copy", adam, true, DType::kFloat16);
  add("adam_step/bf16_remainder", adam_with_remainder);
  add("adam_step/bf16_remainder_states8", adam_with_states8);
  add("sum_of_squares", sum_of_squares);
  add("fingerprint", fingerprint);
  add("fingerprint_and_copy", copy, true);
  add("memcpy", copy, false);
  for (const DType narrow : {DType::kBFloat16, DType::kFloat16}) {
    const std::string name(name_of(narrow));
    add("cast/float32_to_" + name, cast, narrow, kFp32);
    add("cast/" + name + "_to_float32", cast, kFp32, narrow);
    add("accumulate/" + name, accumulate, narrow);
  }
  for (const std::size_t world : {std::size_t{2}, std::size_t{4}}) {
    for (const DType from : {kFp32, DType::kBFloat16}) {
      add("sum_in_order/" + std::string(name_of(from)) + "/" + std::to_string(world) + "_sources",
          sum_in_order, from, world);
    }
  }
}

}  // namespace
}  // namespace strata::bench

int main(int argc, char** argv) {
  strata::bench::add_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

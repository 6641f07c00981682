#include "strata/engine/optimize/matrix_exchange.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"

namespace strata::engine {
namespace {

std::span<std::byte> part(std::span<std::byte> all, Bytes at, Numel numel) {
  return all.subspan(at.size(), bytes_of(numel, DType::kBFloat16).size());
}

}  // namespace

MatrixExchange::MatrixExchange(comm::Collectives& collectives, device::Device& device,
                               std::string name)
    : collectives_(collectives),
      device_(device),
      place_(collectives.shard_position()),
      name_(std::move(name)) {}

void MatrixExchange::set(MatrixPlan plan) {
  free();
  plan_ = std::move(plan);
}

void MatrixExchange::prepare() {
  if (workspace_ != nullptr || plan_.workspace == Bytes()) return;
  workspace_ = device_.allocate(plan_.workspace, memory::Kind::kStaging);
  if (plan_.exchanged.empty()) return;
  ++buffers_;
  given_ = collectives_.allocate(fmt::format("{}.given.{}", name_, buffers_), plan_.given);
  results_ = collectives_.allocate(fmt::format("{}.results.{}", name_, buffers_), plan_.taken);
  charge_.emplace(device_.ledger(), memory::Tier::kDevice, memory::Kind::kStaging,
                  plan_.given + plan_.taken);
  taken_ = device_.allocate(plan_.taken, memory::Kind::kStaging);
  returned_ = device_.allocate(plan_.given, memory::Kind::kStaging);
}

void MatrixExchange::free() {
  workspace_.reset();
  taken_.reset();
  returned_.reset();
  given_.reset();
  results_.reset();
  charge_.reset();
}

template <typename Work>
void MatrixExchange::for_each(const MatrixWindow& window, const Steps& steps, const Work& work) {
  for (const MatrixPiece& piece : window.pieces) {
    const MatrixRun& run = window.runs[piece.run];
    if (steps.counts(run)) work(run, piece);
  }
}

std::span<std::byte> MatrixExchange::matrix_part(const MatrixWindow& window,
                                                 const MatrixPiece& piece) const {
  const Bytes first = bytes_of(piece.first, DType::kBFloat16);
  return part(workspace_->bytes(), window.runs[piece.run].place + first, piece.numel);
}

void MatrixExchange::begin(const MatrixWindow& window, const Steps& steps) {
  for_each(window, steps, [&](const MatrixRun& run, const MatrixPiece& piece) {
    if (piece.holder == place_.index)
      steps.make(run, piece, part(given_->local(), piece.in_source, piece.numel));
  });
  const std::size_t bytes = window.there.received(place_.index).size();
  there_ = collectives_.exchange({given_.get(), taken_->bytes().first(bytes), &window.there},
                                 "matrices");
}

void MatrixExchange::arrive(const MatrixWindow& window, const Steps& steps) {
  std::exchange(there_, nullptr)->wait();
  for_each(window, steps, [&](const MatrixRun& run, const MatrixPiece& piece) {
    if (run.owner == place_.index)
      device_.copy(matrix_part(window, piece), part(taken_->bytes(), piece.in_target, piece.numel),
                   device_.compute_stream());
  });
}

void MatrixExchange::send_back(const MatrixWindow& window, const Steps& steps) {
  for_each(window, steps, [&](const MatrixRun& run, const MatrixPiece& piece) {
    if (run.owner == place_.index)
      device_.copy(part(results_->local(), piece.in_target, piece.numel),
                   matrix_part(window, piece), device_.compute_stream());
  });
  const std::size_t bytes = window.back.received(place_.index).size();
  back_ = collectives_.exchange({results_.get(), returned_->bytes().first(bytes), &window.back},
                                "results");
}

void MatrixExchange::end(const MatrixWindow& window, const Steps& steps) {
  std::exchange(back_, nullptr)->wait();
  for_each(window, steps, [&](const MatrixRun& run, const MatrixPiece& piece) {
    if (piece.holder == place_.index)
      steps.apply(run, piece, part(returned_->bytes(), piece.in_source, piece.numel));
  });
}

// After an error this rank goes on with the exchange, so that no other rank waits in vain.
void MatrixExchange::orthogonalize(const MatrixWindow& window, const Steps& steps) {
  std::vector<OwnedMatrices> owned;
  for (const MatrixRun& run : window.runs) {
    if (run.owner == place_.index && steps.counts(run))
      owned.push_back({run.param, run.begin, part(workspace_->bytes(), run.place, run.numel)});
  }
  if (owned.empty() || failure_.get() != nullptr) return;
  failure_.attempt([&] { steps.orthogonalize(owned); });
}

void MatrixExchange::run_in_place(const MatrixWindow& window, const Steps& steps) {
  for_each(window, steps, [&](const MatrixRun& run, const MatrixPiece& piece) {
    steps.make(run, piece, matrix_part(window, piece));
  });
  orthogonalize(window, steps);
  for_each(window, steps, [&](const MatrixRun& run, const MatrixPiece& piece) {
    steps.apply(run, piece, matrix_part(window, piece));
  });
}

void MatrixExchange::run(const Steps& steps) {
  prepare();
  failure_ = {};
  std::vector<const MatrixWindow*> windows;
  for (const MatrixWindow& window : plan_.exchanged) {
    if (std::ranges::any_of(window.runs, steps.counts)) windows.push_back(&window);
  }
  const std::size_t count = windows.size();
  std::size_t in_place = 0;
  if (count > 0) begin(*windows[0], steps);
  for (std::size_t w = 0; w < count; ++w) {
    for (; in_place < plan_.in_place.size() * (w + 1) / count; ++in_place)
      run_in_place(plan_.in_place[in_place], steps);
    arrive(*windows[w], steps);
    if (w + 1 < count) begin(*windows[w + 1], steps);
    orthogonalize(*windows[w], steps);
    if (w > 0) end(*windows[w - 1], steps);
    send_back(*windows[w], steps);
  }
  for (; in_place < plan_.in_place.size(); ++in_place)
    run_in_place(plan_.in_place[in_place], steps);
  if (count > 0) end(*windows[count - 1], steps);
  run_and_agree(collectives_, "orthogonalizing matrices", [this] { failure_.rethrow(); });
}

}  // namespace strata::engine

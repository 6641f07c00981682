#include "strata/torch/ranks/store_bootstrap.h"

#include <fmt/ranges.h>

#include "strata/base/error.h"

namespace strata::torch {

StoreBootstrap::StoreBootstrap(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                               std::chrono::milliseconds timeout)
    : store_(std::move(store)), rank_(rank), world_size_(world_size), timeout_(timeout) {
  // Every rank makes its bootstraps in the same order, so its own count tells which one this is.
  const std::int64_t count = store_->add(fmt::format("strata/bootstraps/{}", rank_), 1);
  prefix_ = fmt::format("strata/bootstrap/{}", count);
}

std::string StoreBootstrap::key(int rank) const {
  return fmt::format("{}/{}/{}", prefix_, round_, rank);
}

std::vector<std::string> StoreBootstrap::exchange(const std::string& text) {
  ++round_;
  store_->set(key(rank_), std::vector<std::uint8_t>(text.begin(), text.end()));
  std::vector<std::string> texts;
  std::vector<int> absent;
  for (int r = 0; r < world_size_; ++r) {
    try {
      store_->wait({key(r)}, absent.empty() ? timeout_ : std::chrono::milliseconds(1));
      const std::vector<std::uint8_t> bytes = store_->get(key(r));
      texts.emplace_back(bytes.begin(), bytes.end());
    } catch (const std::exception&) {
      absent.push_back(r);
    }
  }
  if (!absent.empty()) {
    throw CommError(fmt::format(
        "rank {} waited {} s for the other ranks to start; these did not come: {}. Start every "
        "rank with the same script, or look at their own errors",
        rank_, std::chrono::duration_cast<std::chrono::seconds>(timeout_).count(),
        fmt::join(absent, ", ")));
  }
  return texts;
}

}  // namespace strata::torch

#include "strata/checkpoint/read_choice.h"

#include <fmt/core.h>

namespace strata::checkpoint {
namespace {

std::string share_of(const ReadFigures& figures) {
  if (!figures.cached) return "unknown how much is cached";
  return fmt::format("{:.0f}% cached", *figures.cached * 100.0);
}

}  // namespace

std::optional<ReadWay> read_way_from(std::string_view name) {
  if (name == "auto") return ReadWay::kAuto;
  if (name == "buffered") return ReadWay::kBuffered;
  if (name == "direct") return ReadWay::kDirect;
  return std::nullopt;
}

bool wants_probe(ReadWay asked, const ReadFigures& figures) {
  return asked == ReadWay::kAuto && figures.direct_offered &&
         figures.cached.value_or(0.0) < kCachedEnough;
}

ReadChoice choose_read(ReadWay asked, const ReadFigures& figures) {
  if (asked == ReadWay::kBuffered) return {false, "as configured", figures};
  if (!figures.direct_offered) return {false, "no direct reads to be had here", figures};
  if (asked == ReadWay::kDirect) return {true, "as configured", figures};
  if (!wants_probe(asked, figures)) return {false, share_of(figures), figures};
  if (!figures.buffered_gb_per_s || !figures.direct_gb_per_s) {
    return {false, fmt::format("{}; too little to probe", share_of(figures)), figures};
  }
  // Cached bytes cost a buffered read next to nothing, and a direct one as much as the rest.
  const double buffered = *figures.buffered_gb_per_s / (1.0 - figures.cached.value_or(0.0));
  return {*figures.direct_gb_per_s > buffered * kDirectGain,
          fmt::format("{}; probe: {:.2f} GB/s buffered, {:.2f} direct", share_of(figures),
                      *figures.buffered_gb_per_s, *figures.direct_gb_per_s),
          figures};
}

}  // namespace strata::checkpoint

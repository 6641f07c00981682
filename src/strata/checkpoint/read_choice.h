// Whether files are read through the page cache or past it: what is known of them, and the rule.
// Pages that are cached come at the speed of memory. Others are read faster past the cache where
// the drive is faster than the copies through it, and slower where the cache's reading ahead helps,
// so that a probe has to tell (ReadProbe, reader.h). Pure. Threads: values; safe everywhere.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace strata::checkpoint {

enum class ReadWay { kAuto, kBuffered, kDirect };

// "auto", "buffered", "direct"; absent for any other name.
std::optional<ReadWay> read_way_from(std::string_view name);

// Absent: not known.
struct ReadFigures {
  bool direct_offered = false;        // by the file system
  std::optional<double> cached = {};  // share of the bytes that is in the page cache, from samples
  // A probe measured them on bytes that were not in the page cache.
  std::optional<double> buffered_gb_per_s = {};
  std::optional<double> direct_gb_per_s = {};
};

struct ReadChoice {
  bool direct = false;
  std::string reason;
  ReadFigures figures;
};

// From this share on, a probe cannot change the choice.
inline constexpr double kCachedEnough = 0.9;
// How much faster direct reads have to be: they leave nothing in the cache for the next start.
inline constexpr double kDirectGain = 1.1;

// Whether choose_read() needs the figures of a probe.
bool wants_probe(ReadWay asked, const ReadFigures& figures);
ReadChoice choose_read(ReadWay asked, const ReadFigures& figures);

}  // namespace strata::checkpoint

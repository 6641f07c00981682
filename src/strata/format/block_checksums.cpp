#include "strata/format/block_checksums.h"

#include <fmt/core.h>
#include <xxhash.h>

#include <algorithm>
#include <charconv>

#include "strata/base/error.h"

namespace strata::format {
namespace {

constexpr std::int64_t kBlocksMax = 65'536;
constexpr std::size_t kDigits = 16;

}  // namespace

std::uint64_t checksum_of(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::string checksum_text(std::uint64_t checksum) {
  return fmt::format("{:016x}", checksum);
}

Bytes BlockChecksums::block_for(Bytes file_bytes) {
  Bytes block = 1_MiB;
  while (file_bytes / block >= kBlocksMax) block = block * 2;
  return block;
}

bool BlockChecksums::fits(Bytes file_bytes) const {
  if (block_.value <= 0 || file_bytes.value < 0) return false;
  const std::int64_t blocks = file_bytes / block_ + (file_bytes % block_ > Bytes() ? 1 : 0);
  return static_cast<std::int64_t>(sums_.size()) == blocks;
}

void BlockChecksums::set(Bytes offset, std::span<const std::byte> bytes) {
  STRATA_ASSERT(offset.value >= 0 && offset % block_ == Bytes());
  auto number = static_cast<std::size_t>(offset / block_);
  for (std::size_t done = 0; done < bytes.size(); done += block_.size(), ++number) {
    if (number >= sums_.size()) sums_.resize(number + 1);
    sums_[number] = checksum_of(bytes.subspan(done, std::min(block_.size(), bytes.size() - done)));
  }
}

Bytes BlockChecksums::first_wrong(Bytes offset, std::span<const std::byte> bytes) const {
  STRATA_ASSERT(offset.value >= 0 && offset % block_ == Bytes());
  auto number = static_cast<std::size_t>(offset / block_);
  for (std::size_t done = 0; done < bytes.size(); done += block_.size(), ++number) {
    const auto part = bytes.subspan(done, std::min(block_.size(), bytes.size() - done));
    if (number >= sums_.size() || sums_[number] != checksum_of(part)) return offset + Bytes(done);
  }
  return Bytes(-1);
}

std::string sums_text(std::span<const std::uint64_t> sums) {
  std::string text;
  text.reserve(sums.size() * kDigits);
  for (const std::uint64_t sum : sums) fmt::format_to(std::back_inserter(text), "{:016x}", sum);
  return text;
}

bool parse_sums(std::string_view text, std::vector<std::uint64_t>& sums) {
  sums.clear();
  if (text.size() % kDigits != 0) return false;
  for (; !text.empty(); text.remove_prefix(kDigits)) {
    std::uint64_t sum = 0;
    const char* end = text.data() + kDigits;
    const auto [stop, error] = std::from_chars(text.data(), end, sum, 16);
    if (error != std::errc() || stop != end) return false;
    sums.push_back(sum);
  }
  return true;
}

void RunningChecksum::Free::operator()(XXH3_state_s* state) const {
  XXH3_freeState(state);
}

RunningChecksum::RunningChecksum() : state_(XXH3_createState()) {
  STRATA_ASSERT(state_ != nullptr);
  restart();
}

void RunningChecksum::restart() {
  XXH3_64bits_reset(state_.get());
}

void RunningChecksum::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(state_.get(), bytes.data(), bytes.size());
}

std::uint64_t RunningChecksum::value() const {
  return XXH3_64bits_digest(state_.get());
}

}  // namespace strata::format

#include "strata/offload/drive_blocks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "strata/base/error.h"
#include "strata/format/block_checksums.h"

namespace strata::offload {
namespace {

constexpr std::size_t kPage = kPartAlignment.size();

std::size_t page_count(Bytes bytes) {
  return (bytes.size() + kPage - 1) / kPage;
}

}  // namespace

DriveBlocks::DriveBlocks(std::shared_ptr<memory::Ledger> ledger, bool verify)
    : ledger_(std::move(ledger)), verify_(verify) {}

Bytes DriveBlocks::end_with(Bytes bytes) const {
  return end_ + align_up(bytes, kPartAlignment);
}

BlockId DriveBlocks::add(BlockSpec spec) {
  Block block;
  block.name = std::move(spec.name);
  block.size = spec.bytes;
  block.offset = end_;
  block.charge = memory::Charge(ledger_, memory::Tier::kNvme, spec.kind, spec.bytes);
  const std::size_t pages = page_count(spec.bytes);
  block.written.resize(pages);
  if (verify_) {
    const Bytes bytes(pages * sizeof(std::uint64_t));
    block.checksum_charge =
        memory::Charge(ledger_, memory::Tier::kHost, memory::Kind::kWorkspace, bytes);
    block.checksums.resize(pages);
  }
  const Bytes end = end_with(spec.bytes);
  blocks_.push_back(std::move(block));
  end_ = end;
  return static_cast<BlockId>(blocks_.size() - 1);
}

void DriveBlocks::remove_last(std::size_t count) noexcept {
  if (count == 0) return;
  const auto first = blocks_.end() - static_cast<std::ptrdiff_t>(count);
  end_ = first->offset;
  blocks_.erase(first, blocks_.end());
}

const DriveBlocks::Block& DriveBlocks::at(BlockId block) const {
  if (block < 0 || static_cast<std::size_t>(block) >= blocks_.size()) {
    throw UsageError(fmt::format(
        "no such block in the nvme store: use the ids that add() returned; block {}, {} blocks",
        block, blocks_.size()));
  }
  return blocks_[static_cast<std::size_t>(block)];
}

bool DriveBlocks::written(const Part& part) const {
  const Block& block = at(part.block);
  if (block.written_count == block.written.size()) return part.bytes().value > 0;
  if (block.written_count == 0) return false;
  const auto first = block.written.begin();
  const auto begin = static_cast<std::ptrdiff_t>(part.begin.size() / kPage);
  const auto end = static_cast<std::ptrdiff_t>(page_count(part.end));
  return std::find(first + begin, first + end, true) != first + end;
}

void DriveBlocks::record_written(const Part& part, std::span<const std::byte> pages) {
  at(part.block);
  Block& block = blocks_[static_cast<std::size_t>(part.block)];
  const std::size_t begin = part.begin.size() / kPage;
  for (std::size_t i = 0; i < pages.size() / kPage; ++i) {
    if (!block.written[begin + i]) ++block.written_count;
    block.written[begin + i] = true;
    if (verify_) block.checksums[begin + i] = format::checksum_of(pages.subspan(i * kPage, kPage));
  }
}

void DriveBlocks::accept_read(const Part& part, std::span<std::byte> pages,
                              const std::string& path) const {
  const Block& block = at(part.block);
  const bool whole = block.written_count == block.written.size();
  if (whole && !verify_) return;
  const std::size_t begin = part.begin.size() / kPage;
  for (std::size_t i = 0; i < pages.size() / kPage; ++i) {
    const std::span<std::byte> page = pages.subspan(i * kPage, kPage);
    if (!block.written[begin + i]) {
      std::memset(page.data(), 0, page.size());
    } else if (verify_ && format::checksum_of(page) != block.checksums[begin + i]) {
      throw IoError(
          fmt::format("what was read is not what was written (its checksum differs); the drive or "
                      "another process has changed it: path={} offset={} wanted={}",
                      path, (offset_of(part) + Bytes(i * kPage)).value, kPage));
    }
  }
}

std::string DriveBlocks::fail(const Part& part, const std::string& what, const std::string& why) {
  at(part.block);
  Block& block = blocks_[static_cast<std::size_t>(part.block)];
  std::string failure =
      fmt::format("states on a drive could not be {}: block '{}', bytes [{}, {}): {}", what,
                  block.name, part.begin.value, part.end.value, why);
  if (block.failure.empty()) block.failure = failure;
  if (first_failure_.empty()) first_failure_ = failure;
  return failure;
}

void DriveBlocks::require_good(BlockId block) const {
  if (const Block& found = at(block); !found.failure.empty()) throw IoError(found.failure);
}

}  // namespace strata::offload

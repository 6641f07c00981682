#include "strata/format/block_writer.h"

#include <utility>

#include "strata/base/error.h"

namespace strata::format {

BlockWriter::BlockWriter(const std::string& folder, std::string name, Bytes bytes, io::IoEngine& io,
                         io::FolderCalls& calls)
    : io_(io),
      calls_(calls),
      entry_{std::move(name), bytes, BlockChecksums(BlockChecksums::block_for(bytes), {})},
      file_(calls.create(fmt::format("{}/{}", folder, entry_.name)).direct()) {
  calls_.reserve(file_, bytes);
}

std::unique_ptr<io::Transfer> BlockWriter::write(std::span<const std::byte> bytes) {
  const Bytes end = written_ + Bytes(bytes.size());
  STRATA_ASSERT(end <= entry_.bytes && (end == entry_.bytes || end % block() == Bytes()));
  entry_.checksums.set(written_, bytes);
  std::unique_ptr<io::Transfer> transfer = io_.write(file_, written_, bytes);
  written_ = end;
  return transfer;
}

ManifestFile BlockWriter::finish() {
  STRATA_ASSERT(written_ == entry_.bytes);
  calls_.sync_file(file_);
  calls_.open_to_others(file_);
  return std::move(entry_);
}

}  // namespace strata::format

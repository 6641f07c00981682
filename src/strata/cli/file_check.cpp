#include "strata/cli/file_check.h"

#include <algorithm>
#include <utility>

#include "strata/base/error.h"
#include "strata/cli/checked_read.h"
#include "strata/cli/chosen_checkpoint.h"
#include "strata/format/message_text.h"

namespace strata::cli {
namespace {

using OpenFiles = std::vector<std::optional<io::File>>;

OpenFiles open_files(const std::string& folder, const format::Manifest& manifest,
                     std::vector<Finding>& findings) {
  OpenFiles files(manifest.files.size());
  for (std::size_t i = 0; i < files.size(); ++i) {
    const format::ManifestFile& file = manifest.files[i];
    try {
      files[i].emplace(open_checkpoint_file(folder, file.name, file.bytes));
    } catch (const Error& error) {
      findings.push_back({file.name, std::nullopt, {}, error.what()});
    }
  }
  return files;
}

bool follows(const Finding& before, const WrongRange& wrong, const std::string& file) {
  return before.file == file && before.range && before.range->end == wrong.begin &&
         before.problem == wrong.problem;
}

}  // namespace

std::string text_of(const Finding& finding) {
  if (!finding.range) return finding.problem;
  return fmt::format("file {}: bytes [{}, {}): {}; they belong to {}",
                     format::in_quotes(finding.file), finding.range->begin.value,
                     finding.range->end.value, finding.problem,
                     finding.tensors.empty() ? "the header or the space between tensors"
                                             : format::first_ten(finding.tensors));
}

std::vector<std::string> owners_of(const format::Manifest& manifest, std::size_t file,
                                   ByteRange range) {
  const auto& extents = manifest.extents;
  const auto end_of = [](const format::ManifestExtent& extent) {
    return extent.offset + bytes_of(extent.end - extent.begin, extent.dtype);
  };
  // Extents lie one behind the other, so their ends are in order, too.
  auto extent = std::ranges::partition_point(extents, [&](const format::ManifestExtent& e) {
    return e.file < file || (e.file == file && end_of(e) <= range.begin);
  });
  std::vector<std::string> owners;
  for (; extent != extents.end() && extent->file == file && extent->offset < range.end; ++extent)
    owners.push_back(fmt::format("tensor {} ({})",
                                 format::in_quotes(manifest.tensors[extent->tensor].name),
                                 manifest.kinds[extent->kind]));
  return owners;
}

std::vector<Finding> check_files(const std::string& folder, const format::Manifest& manifest) {
  std::vector<Finding> findings;
  open_files(folder, manifest, findings);
  return findings;
}

std::vector<Finding> verify_files(const std::string& folder, const format::Manifest& manifest,
                                  io::IoEngine& io, const std::shared_ptr<memory::Ledger>& ledger,
                                  Console& console) {
  std::vector<Finding> findings;
  const OpenFiles files = open_files(folder, manifest, findings);
  CheckedReading reading;
  std::vector<io::FileRange> ranges;
  Bytes total;
  for (std::size_t i = 0; i < files.size(); ++i) {
    reading.files.push_back(files[i] ? &*files[i] : nullptr);
    if (!files[i]) continue;
    ranges.push_back({i, Bytes(), manifest.files[i].bytes});
    total += manifest.files[i].bytes;
  }
  Progress progress("verifying", total, console);
  reading.sums = manifest.files;
  reading.ranges = ranges;
  reading.take = [&](std::size_t, Bytes, std::span<const std::byte> bytes) {
    progress.add(Bytes(bytes.size()));
  };
  std::vector<std::size_t> places;  // files of the findings that have ranges
  const std::size_t whole = findings.size();
  reading.wrong = [&](const WrongRange& wrong) {
    const std::string& name = manifest.files[wrong.file].name;
    if (findings.size() > whole && follows(findings.back(), wrong, name)) {
      findings.back().range->end = wrong.end;
      return;
    }
    findings.push_back({name, ByteRange{wrong.begin, wrong.end}, {}, wrong.problem});
    places.push_back(wrong.file);
  };
  BufferRing ring({}, ledger);
  read_checked(reading, io, ring);
  for (std::size_t i = whole; i < findings.size(); ++i)
    findings[i].tensors = owners_of(manifest, places[i - whole], *findings[i].range);
  return findings;
}

}  // namespace strata::cli

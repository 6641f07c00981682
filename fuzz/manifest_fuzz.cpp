// libFuzzer target: the input is a checkpoint's manifest. Either it is refused with FormatError, or
// every extent lies within its file and its tensor, and a written copy has the same contents. A
// mutated manifest has a wrong checksum, so the target also tries it with the right one: the code
// behind that check must not depend on it.
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>

#include "strata/base/error.h"
#include "strata/format/manifest.h"

namespace {

using namespace strata;

void check(const format::Manifest& manifest) {
  for (const format::ManifestRange& extent : manifest.extents) {
    const format::ManifestFile& file = manifest.files.at(extent.file);
    const Bytes bytes = bytes_of(extent.end - extent.begin, extent.dtype);
    STRATA_ASSERT(extent.tensor < manifest.tensors.size() && extent.kind < manifest.kinds.size());
    STRATA_ASSERT(extent.begin.value >= 0 && extent.begin < extent.end);
    STRATA_ASSERT(extent.offset.value >= 0 && extent.offset <= file.bytes - bytes);
    STRATA_ASSERT(file.checksums.fits(file.bytes) && format::is_plain_file_name(file.name));
    STRATA_ASSERT(!owners_of(manifest, extent.file, extent.offset, end_of(extent)).empty());
  }
  const std::string text = to_text(manifest);
  STRATA_ASSERT(to_text(format::parse_manifest(text, "fuzz")) == text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    check(format::parse_manifest(text, "fuzz"));
  } catch (const FormatError& error) {
    // A text that is not JSON, or that nests too deeply, ends here.
    if (std::string_view(error.what()).find("checksum") == std::string_view::npos) return 0;
  }
  auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return 0;
  json.erase("checksum");
  const std::string unsigned_text = json.dump();
  json["checksum"] =
      format::checksum_text(format::checksum_of(std::as_bytes(std::span(unsigned_text))));
  try {
    check(format::parse_manifest(json.dump(), "fuzz"));
  } catch (const FormatError&) {
  }
  return 0;
}

#include "strata/format/same_tensor.h"

#include <algorithm>
#include <vector>

#include "strata/base/error.h"
#include "strata/format/message_text.h"
#include "strata/io/pending_range.h"

namespace strata::format {
namespace {

constexpr Bytes kPiece = 1_MiB;

const CheckpointTensor& find_or_throw(const CheckpointIndex& checkpoint, std::string_view name) {
  const CheckpointTensor* tensor = checkpoint.find(name);
  if (tensor == nullptr) {
    throw FormatError(fmt::format("{}: there is no tensor {}", checkpoint.path(), in_quotes(name)));
  }
  return *tensor;
}

}  // namespace

bool same_tensor(const CheckpointIndex& checkpoint, std::string_view one, std::string_view other) {
  const CheckpointTensor& a = find_or_throw(checkpoint, one);
  const CheckpointTensor& b = find_or_throw(checkpoint, other);
  if (a.info.dtype != b.info.dtype || a.info.shape != b.info.shape) return false;
  std::vector<std::byte> first(std::min(kPiece, a.info.bytes).size());
  std::vector<std::byte> second(first.size());
  for (Bytes at; at < a.info.bytes; at += kPiece) {
    const std::size_t count = std::min(kPiece, a.info.bytes - at).size();
    io::read_fully(checkpoint.files()[a.file].file(), a.info.offset + at,
                   std::span(first).first(count));
    io::read_fully(checkpoint.files()[b.file].file(), b.info.offset + at,
                   std::span(second).first(count));
    if (!std::equal(first.begin(), first.begin() + static_cast<std::ptrdiff_t>(count),
                    second.begin())) {
      return false;
    }
  }
  return true;
}

}  // namespace strata::format

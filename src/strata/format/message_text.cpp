#include "strata/format/message_text.h"

#include <algorithm>

#include "strata/base/error.h"

namespace strata::format {
namespace {

constexpr std::size_t kShownBytesMax = 160;
constexpr std::size_t kShownItemsMax = 10;

}  // namespace

std::string in_quotes(std::string_view text) {
  std::size_t cut = std::min(text.size(), kShownBytesMax);
  // Not within a UTF-8 sequence: messages must stay valid UTF-8.
  while (cut < text.size() && cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0U) == 0x80) {
    --cut;
  }
  std::string shown = "'";
  for (const char c : text.substr(0, cut)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      shown += fmt::format("\\x{:02x}", static_cast<unsigned>(byte));
    } else {
      shown += c;
    }
  }
  shown += cut < text.size() ? fmt::format("...' ({} bytes)", text.size()) : "'";
  return shown;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string shown = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    shown += fmt::format("{}{}", i == 0 ? "" : ", ", shape[i]);
  }
  return shown + "]";
}

std::string first_ten(std::span<const std::string> items) {
  std::string shown;
  const std::size_t count = std::min(items.size(), kShownItemsMax);
  for (std::size_t i = 0; i < count; ++i) {
    if (i != 0) shown += ", ";
    shown += items[i];
  }
  if (items.size() > count) shown += fmt::format(" and {} more", items.size() - count);
  return shown;
}

}  // namespace strata::format

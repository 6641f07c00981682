// A short text that one thread writes while others may read it, in memory that processes share. A
// reader may see a mixture of two texts: good enough for saying in an error what a rank is doing.
// Longer texts are cut. Zeroed memory is the empty text.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace strata::comm {

template <std::size_t kChars>
class SharedText {
  static_assert(kChars % sizeof(std::uint64_t) == 0);

 public:
  void store(std::string_view text) noexcept {
    std::array<std::uint64_t, kChars / 8> words{};
    std::memcpy(words.data(), text.data(), std::min(text.size(), kChars));
    for (std::size_t i = 0; i < words.size(); ++i) {
      words_[i].store(words[i], std::memory_order_relaxed);
      if (words[i] == 0) break;  // the end of the text
    }
  }

  std::string load() const {
    std::array<char, kChars> chars{};
    for (std::size_t i = 0; i < words_.size(); ++i) {
      const std::uint64_t word = words_[i].load(std::memory_order_relaxed);
      std::memcpy(chars.data() + i * sizeof(word), &word, sizeof(word));
    }
    return {chars.begin(), std::find(chars.begin(), chars.end(), '\0')};
  }

 private:
  std::array<std::atomic<std::uint64_t>, kChars / 8> words_{};
};

}  // namespace strata::comm

#include "strata/torch/ranks/peer_notes.h"

#include <fmt/core.h>

#include <algorithm>
#include <thread>

namespace strata::torch {

PeerNotes::PeerNotes(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank,
                     int world_size)
    : store_(std::move(store)), name_(std::move(name)), rank_(rank), world_size_(world_size) {}

std::string PeerNotes::key(int rank) const {
  return fmt::format("strata/notes/{}/{}", name_, rank);
}

void PeerNotes::post(PeerNote::Kind kind, std::string_view text) noexcept {
  try {
    const std::string note = static_cast<char>(kind) + std::string(text);
    store_->set(key(rank_), std::vector<std::uint8_t>(note.begin(), note.end()));
  } catch (const std::exception&) {
    return;  // the store is gone; the backend's own error must suffice
  }
}

std::vector<std::optional<PeerNote>> PeerNotes::read() noexcept {
  std::vector<std::optional<PeerNote>> notes(static_cast<std::size_t>(world_size_));
  try {
    for (int r = 0; r < world_size_; ++r) {
      if (!store_->check({key(r)})) continue;
      const std::vector<std::uint8_t> bytes = store_->get(key(r));
      if (bytes.empty()) continue;
      notes[static_cast<std::size_t>(r)] = PeerNote{static_cast<PeerNote::Kind>(bytes[0]),
                                                    std::string(bytes.begin() + 1, bytes.end())};
    }
  } catch (const std::exception&) {
    return notes;
  }
  return notes;
}

std::vector<std::optional<PeerNote>> PeerNotes::wait_for_all(
    std::chrono::milliseconds limit) noexcept {
  const auto end = std::chrono::steady_clock::now() + limit;
  for (;;) {
    auto notes = read();
    const bool all =
        std::all_of(notes.begin(), notes.end(), [](const auto& note) { return note.has_value(); });
    if (all || std::chrono::steady_clock::now() >= end) return notes;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace strata::torch

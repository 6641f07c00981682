#include "strata/offload/drive_limit.h"

#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <utility>

#include "strata/memory/host_buffer.h"

namespace strata::offload {
namespace {

constexpr Bytes kTransfer = 1_MiB;
constexpr std::int64_t kAtOnce = 8;
constexpr Bytes kAll = kTransfer * kAtOnce;
// A fast drive gets more than one round of them, so that what it takes to begin counts little.
constexpr Bytes kMost = kAll * 4;
constexpr double kSecondsEnough = 0.02;

// Some drives store zeroes without writing any.
void fill_with_noise(std::span<std::byte> bytes) {
  std::mt19937_64 random(1);
  for (std::size_t i = 0; i + sizeof(std::uint64_t) <= bytes.size(); i += sizeof(std::uint64_t)) {
    const std::uint64_t noise = random();
    std::memcpy(bytes.data() + i, &noise, sizeof(noise));
  }
}

}  // namespace

DriveLimit measure_drive(BlockFile& file, Bytes begin) {
  using Clock = std::chrono::steady_clock;
  file.grow(begin + kAll);
  memory::HostBuffer buffer(kAll);
  fill_with_noise(buffer.bytes());
  const auto gb_per_s = [&](const auto& start) {
    std::array<std::unique_ptr<io::Transfer>, static_cast<std::size_t>(kAtOnce)> transfers;
    const Clock::time_point began = Clock::now();
    const auto seconds = [&] {
      return std::chrono::duration<double>(Clock::now() - began).count();
    };
    Bytes moved;
    for (std::int64_t i = 0; moved < kAll || (moved < kMost && seconds() < kSecondsEnough); ++i) {
      std::unique_ptr<io::Transfer>& slot = transfers.at(static_cast<std::size_t>(i % kAtOnce));
      if (slot != nullptr) std::exchange(slot, nullptr)->wait();
      const Bytes at = kTransfer * (i % kAtOnce);
      slot = start(begin + at, buffer.bytes().subspan(at.size(), kTransfer.size()));
      moved += kTransfer;
    }
    for (const auto& transfer : transfers) transfer->wait();
    return static_cast<double>(moved.value) / seconds() * 1e-9;
  };
  DriveLimit limit;
  // First, for there to be something to read: space that was only taken reads as zeroes, from
  // nowhere.
  limit.write_gb_per_s = gb_per_s([&](Bytes at, auto bytes) { return file.write(at, bytes); });
  limit.read_gb_per_s = gb_per_s([&](Bytes at, auto bytes) { return file.read(at, bytes); });
  return limit;
}

}  // namespace strata::offload

// Devices count how much of their peers' memory ranks have mapped, and when.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "comm/conformance_ranks.h"
#include "strata/comm/host/host_collectives.h"
#include "strata/comm/peer/peer_collectives.h"
#include "strata/device/cpu_device.h"

namespace strata::comm::conformance {
namespace {

constexpr int kWorld = 3;
constexpr std::size_t kHalf = 1 << 20;
constexpr std::size_t kProof = 4096;  // by which peers were proven, and which is freed

// Bytes of peers that are mapped now.
class MappedBytes {
 public:
  void change(Bytes by) {
    const std::lock_guard lock(mutex_);
    bytes_ += by;
    changed_.notify_all();
  }
  bool are(Bytes wanted) {
    const std::lock_guard lock(mutex_);
    return bytes_ == wanted;
  }
  // Waits until `wanted` bytes are mapped; false after a minute.
  bool become(Bytes wanted) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(60), [&] { return bytes_ == wanted; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  Bytes bytes_;
};

class CountedMapping final : public device::PeerMapping {
 public:
  CountedMapping(std::unique_ptr<device::PeerMapping> mapping, MappedBytes& count)
      : mapping_(std::move(mapping)), count_(count) {}
  ~CountedMapping() override { count_.change(Bytes() - mapping_->mapped()); }
  const std::byte* base() const override { return mapping_->base(); }
  Bytes mapped() const override { return mapping_->mapped(); }
  std::size_t pieces() const override { return mapping_->pieces(); }
  void add(device::SharedHandle piece) override {
    const Bytes bytes = piece.bytes;
    mapping_->add(std::move(piece));
    count_.change(bytes);
  }

 private:
  std::unique_ptr<device::PeerMapping> mapping_;
  MappedBytes& count_;
};

class MappingDevice final : public device::CpuDevice {
 public:
  std::unique_ptr<device::PeerMapping> reserve_mapping(Bytes bytes) override {
    return std::make_unique<CountedMapping>(CpuDevice::reserve_mapping(bytes), mapped);
  }
  MappedBytes mapped;
};

using Body = std::function<void(Collectives&, MappedBytes&)>;

void run(const Body& body) {
  LocalGroup group(kWorld);
  std::vector<std::shared_ptr<MappingDevice>> devices;
  for (int r = 0; r < kWorld; ++r) devices.push_back(std::make_shared<MappingDevice>());
  const auto device = [&](int rank) { return devices[static_cast<std::size_t>(rank)]; };
  const auto results = run_as_threads(
      kWorld, [&](int rank) { return make_peer_collectives(device(rank), group.rank(rank)); },
      [&](Collectives& c) {
        body(c, device(c.rank())->mapped);
        c.barrier();
        return std::string();
      });
  EXPECT_THAT(results, testing::Each(""));
}

void gather(Collectives& c, const SharedBuffer& buffer, std::size_t bytes) {
  std::vector<std::byte> flat(bytes * kWorld);
  c.all_gather({&buffer, 0_B, 0_B, Bytes(bytes)}, flat, buffer.name())->wait();
}

Bytes of_peers(std::size_t bytes) {
  return Bytes(bytes * (kWorld - 1));
}

TEST(PeerMapper, MapsABufferThatGrowsWithoutAnyGather) {
  run([](Collectives& c, MappedBytes& mapped) {
    const auto buffer = c.allocate_growing("weights", Bytes(2 * kHalf));
    for (std::size_t half = 1; half <= 2; ++half) {
      buffer->back(Bytes(half * kHalf));
      require(mapped.become(of_peers(kProof + half * kHalf)), "what there is is mapped");
      c.barrier();
    }
    gather(c, *buffer, 2 * kHalf);
    c.barrier();
  });
}

TEST(PeerMapper, LetsGoOfWhatPeersHaveFreed) {
  run([](Collectives& c, MappedBytes& mapped) {
    {
      const auto first = c.allocate("first", Bytes(kHalf));
      c.barrier();
      gather(c, *first, kHalf);
      c.barrier();
    }
    c.barrier();
    const auto second = c.allocate("second", Bytes(kHalf));
    c.barrier();
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!mapped.are(of_peers(kHalf)) && std::chrono::steady_clock::now() < give_up)
      gather(c, *second, kHalf);
    require(mapped.are(of_peers(kHalf)), "what is freed is not mapped");
    c.barrier();
  });
}

}  // namespace
}  // namespace strata::comm::conformance

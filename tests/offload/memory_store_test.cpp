#include "strata/offload/memory_store.h"

#include <algorithm>

#include "offload/state_store_conformance.h"
#include "strata/base/thread_pool.h"
#include "strata/device/cpu_device.h"

namespace strata::offload {
namespace {

// Leases that the host reads and writes by itself.
struct PlainAccess {
  static void write(std::span<std::byte> target, std::span<const std::byte> source) {
    std::copy(source.begin(), source.end(), target.begin());
  }
  static void read(std::span<std::byte> target, std::span<const std::byte> source) {
    write(target, source);
  }
};

struct HostHarness : PlainAccess {
  static constexpr memory::Tier kTier = memory::Tier::kHost;
  static constexpr Bytes kRoom = 1_MiB;

  std::unique_ptr<StateStore> make() {
    return MemoryStore::on_host({.ledger = ledger, .memory_limit = kRoom, .touch = &pool});
  }
  Bytes charged(memory::Kind kind) const { return ledger->held(kTier, kind); }

  std::shared_ptr<memory::Ledger> ledger = std::make_shared<memory::Ledger>();
  ThreadPool pool{2};
};

struct CpuDeviceHarness : PlainAccess {
  static constexpr memory::Tier kTier = memory::Tier::kDevice;
  static constexpr Bytes kRoom = 1_MiB;

  std::unique_ptr<StateStore> make() { return MemoryStore::on_device(device); }
  Bytes charged(memory::Kind kind) const { return device.ledger()->held(kTier, kind); }

  device::CpuDevice device{{.memory_limit = kRoom}};
};

INSTANTIATE_TYPED_TEST_SUITE_P(OnHost, StateStoreConformance, HostHarness);
INSTANTIATE_TYPED_TEST_SUITE_P(OnCpuDevice, StateStoreConformance, CpuDeviceHarness);

TEST(MemoryStore, ALeaseKeepsItsBlockWhenTheStoreGoes) {
  auto store = MemoryStore::on_host({});
  const auto lease =
      store->fetch(store->add("block", 10_B, memory::Kind::kMasterWeights), Access::kRead);
  store.reset();
  EXPECT_EQ(lease->bytes()[9], std::byte{0});
}

}  // namespace
}  // namespace strata::offload

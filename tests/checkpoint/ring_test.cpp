#include <gmock/gmock.h>

#include "io/temporary_folder.h"
#include "strata/base/error.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/device/cpu_device.h"
#include "strata/io/thread_engine.h"

namespace strata::checkpoint {
namespace {

TEST(TransferRing, ChargesItsBuffersAndGivesThemBack) {
  device::CpuDevice device;
  const auto& ledger = device.ledger();
  {
    const TransferRing ring({3, 64_KiB}, device);
    EXPECT_EQ(ledger->held(memory::Tier::kHost, memory::Kind::kStaging), 192_KiB);
  }
  EXPECT_EQ(ledger->held(memory::Tier::kHost), 0_B);
}

TEST(TransferRing, BuffersBeginAtBlocksOfDirectTransfers) {
  device::CpuDevice device;
  TransferRing ring({3, 5000_B}, device);
  for (std::size_t turn = 0; turn < ring.size(); ++turn) {
    const auto address = reinterpret_cast<std::uintptr_t>(ring.buffer(turn).data());
    EXPECT_EQ(address % io::File::kDirectBlock.size(), 0U);
    EXPECT_EQ(ring.buffer(turn).size(), 5000U);
  }
}

TEST(TransferRing, ReportsAFailedTransferToTheNextUserOfItsBuffer) {
  const testing::TemporaryFolder folder;
  const io::File file(folder.write("short", "abc"), io::File::Mode::kRead);
  io::ThreadEngine io;
  device::CpuDevice device;
  TransferRing ring({2, 4_KiB}, device);
  ring.started(ring.next(), io.read(file, 0_B, ring.buffer(0)));
  EXPECT_NO_THROW(ring.next());
  EXPECT_THROW(ring.next(), IoError);
  EXPECT_NO_THROW(ring.drain()) << "an error is reported once";
}

TEST(TransferRing, OfPageableMemoryIsChargedToItsLedger) {
  const auto ledger = std::make_shared<memory::Ledger>();
  {
    TransferRing ring({2, 5000_B}, ledger);
    EXPECT_EQ(ledger->held(memory::Tier::kHost, memory::Kind::kStaging), 16_KiB);
    EXPECT_EQ(ring.buffer(1).data() - ring.buffer(0).data(), 8192);
  }
  EXPECT_EQ(ledger->held(memory::Tier::kHost), 0_B);
}

TEST(TransferRing, RefusesToBeEmpty) {
  device::CpuDevice device;
  EXPECT_THROW(TransferRing({0, 4_KiB}, device), UsageError);
  EXPECT_THROW(TransferRing({2, 1_B}, device), UsageError);
}

}  // namespace
}  // namespace strata::checkpoint

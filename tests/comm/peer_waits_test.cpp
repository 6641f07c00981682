// Streams of different ranks wait for each other: other events than the flag may end such a wait.
#include <gmock/gmock.h>

#include <atomic>

#include "comm/rank_runners.h"
#include "strata/base/error.h"
#include "strata/comm/host/host_collectives.h"
#include "strata/comm/peer/peer_collectives.h"
#include "strata/comm/peer/peer_signals.h"
#include "strata/device/cpu_device.h"

namespace strata::comm::conformance {
namespace {

TEST(FlagWatch, NamesAPeerOnlyWhereOneWaitLastsAllLooksOfATimeout) {
  FlagWatch watch(std::chrono::milliseconds(400));
  device::Flag flag = 0;
  EXPECT_FALSE(watch.look());
  watch.expect(PeerFlags::Kind::kGiven, 3, flag, 1);
  for (std::uint32_t count = 1; count < 5; ++count) {  // late each time, and there in the end
    for (int i = 0; i < FlagWatch::kLooks; ++i) EXPECT_FALSE(watch.look());
    watch.expect(PeerFlags::Kind::kGiven, 3, flag, count + 1);
    flag = count;
  }
  for (int i = 0; i < FlagWatch::kLooks; ++i) EXPECT_FALSE(watch.look());
  const auto late = watch.look();
  ASSERT_TRUE(late);
  EXPECT_EQ(late->rank, 3);
  EXPECT_THAT(late->failure, testing::AllOf(testing::HasSubstr("its values of an exchange"),
                                            testing::HasSubstr("timeout of 400 ms")));
  flag = 5;
  EXPECT_FALSE(watch.look());
}

// Writes the given number of flags, then none until let_go(): stands for a rank that has stopped.
class HeldDevice final : public device::CpuDevice {
 public:
  void hold_after(int flags) { left_ = flags; }
  void let_go() {
    gone_ = true;
    gone_.notify_all();
  }
  void write_flag(device::Flag& flag, std::uint32_t value, device::Stream& stream) override {
    if (left_ >= 0 && left_-- == 0) gone_.wait(false);
    CpuDevice::write_flag(flag, value, stream);
  }

 private:
  int left_ = -1;  // of rank 1's thread
  std::atomic<bool> gone_ = false;
};

// It lives, so its socket stays open. With one flag more it is the end of a buffer that waits.
TEST(PeerCollectives, AWaitForARankThatLivesAndDoesNotComeEndsAtTheTimeout) {
  for (const int flags : {0, 1}) {
    LocalGroup group(2);
    const auto held = std::make_shared<HeldDevice>();
    const auto make = [&](int rank) {
      return make_peer_collectives(rank == 1 ? held : std::make_shared<device::CpuDevice>(),
                                   group.rank(rank), {.timeout = std::chrono::seconds(1)});
    };
    const auto results = run_as_threads(2, make, [&](Collectives& c) {
      auto buffer = c.allocate("mine", 4096_B);
      c.barrier();
      if (c.rank() == 1) held->hold_after(flags);
      std::string message = "no error";
      try {
        c.barrier();
        buffer.reset();
        c.barrier();
      } catch (const CommError& error) {
        message = error.what();
      }
      if (c.rank() == 0) held->let_go();
      return message;
    });
    EXPECT_THAT(results, testing::Each(testing::AllOf(
                             testing::HasSubstr("rank 1 lives but does not come"),
                             testing::HasSubstr("at a barrier"), testing::HasSubstr("1000 ms"))));
  }
}

}  // namespace
}  // namespace strata::comm::conformance

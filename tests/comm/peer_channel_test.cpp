// The channel between the ranks of a host against a peer that misbehaves: rank 0 is a PeerChannel,
// rank 1 a script of this test.
#include "strata/comm/peer/peer_channel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/host/host_collectives.h"

namespace strata::comm {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""min;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

// Records the channel's notifications.
class Notes final : public PeerChannel::Service {
 public:
  std::optional<SharedParts> share(const std::string& key, std::size_t) override {
    if (key == "throws") throw std::bad_alloc();
    return std::nullopt;
  }
  std::optional<LatePeer> late_peer() override { return std::nullopt; }
  void failed(const std::string& message) noexcept override {
    const std::lock_guard lock(mutex_);
    message_ = message;
    told_.notify_all();
  }
  std::string wait_for_failure() {
    std::unique_lock lock(mutex_);
    told_.wait(lock, [&] { return !message_.empty(); });
    return message_;
  }
  std::string failure() {
    const std::lock_guard lock(mutex_);
    return message_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable told_;
  std::string message_;
};

// The connections of rank 1 to rank 0.
struct Script {
  std::string address;    // of rank 0
  FileDescriptor asking;  // to rank 0
  FileDescriptor asked;   // rank 0 asks through it

  void send(std::string_view line) const {
    ASSERT_TRUE(send_message(asking.get(), line, {})) << line;
  }
  std::string receive() const { return receive_message(asking.get()).text; }
};

// A channel of rank 0, and the script that met it. `connecting` runs when rank 0 has connected and
// the script has not, `met` when both have.
struct SyncPoint {
  explicit SyncPoint(std::chrono::milliseconds timeout,
                     const std::function<void(Script&)>& connecting = {},
                     const std::function<void()>& met = {}) {
    LocalGroup group(2);
    std::thread rank_1([&, control = std::shared_ptr<Collectives>(group.rank(1))] {
      std::string mine;
      FileDescriptor listener = listen_at_new_address(mine);
      control->all_gather_text("");
      script.address = control->all_gather_text(mine)[0];
      script.asked = accept_from(listener.get());
      receive_message(script.asked.get());  // its hello
      if (connecting) connecting(script);
      script.asking = connect_to(script.address);
      send_message(script.asking.get(), "H 1", {});
      control->all_gather_text("");
      control->all_gather_text("");
      if (met) met();
    });
    const std::shared_ptr<Collectives> control = group.rank(0);
    try {
      channel = std::make_unique<PeerChannel>(*control, notes, timeout, RankNames{});
    } catch (const CommError& caught) {
      error = caught.what();
    }
    rank_1.join();
  }

  std::string error_of_asking(const std::string& key) {
    try {
      channel->ask(1, key, 0);
    } catch (const CommError& caught) {
      return caught.what();
    }
    return "no error";
  }

  Notes notes;
  Script script;
  std::unique_ptr<PeerChannel> channel;
  std::string error;
};

TEST(PeerChannel, APeerThatNeverAnswersIsNamedAtTheTimeout) {
  SyncPoint meeting(50ms);
  const std::string error = meeting.error_of_asking("nweights");
  EXPECT_THAT(error, AllOf(HasSubstr("rank 1 lives but does not answer"), HasSubstr("'nweights'"),
                           HasSubstr("50 ms")));
  // It may answer late: nothing that it sends now would fit the next question.
  EXPECT_THAT(meeting.error_of_asking("nmore"), HasSubstr("rank 1 lives but does not answer"));
  EXPECT_EQ(receive_message(meeting.script.asked.get()).text, "Q 0 nweights");
  meeting.channel.reset();
  EXPECT_EQ(receive_message(meeting.script.asked.get()).text, "L");
}

TEST(PeerChannel, AQuestionOnItsWayEndsWithTheAsking) {
  SyncPoint meeting(30min);
  auto error = std::async(std::launch::async, [&] { return meeting.error_of_asking("nweights"); });
  EXPECT_EQ(receive_message(meeting.script.asked.get()).text, "Q 0 nweights");
  meeting.channel->stop_asking();
  EXPECT_THAT(error.get(), HasSubstr("no peer answers"));
}

TEST(PeerChannel, LinesThatNobodyKnowsAreTheFailureOfTheirRank) {
  for (const std::string line : {"Q", "Q ", "Q x y", "Q 1", "Q 99999999999999999999999 n", "Q 0 ",
                                 "H", "H one", "F", "?", "P 1 2 3"}) {
    SyncPoint meeting(30min);
    meeting.script.send(line);
    EXPECT_EQ(meeting.notes.wait_for_failure(),
              "rank 1 failed: it sent a line that this version does not know")
        << line;
  }
}

TEST(PeerChannel, AnAnswerThatNobodyKnowsIsAnError) {
  for (const std::string line : {"P", "P x", "P 1 2", "?"}) {
    SyncPoint meeting(30min);
    ASSERT_TRUE(send_message(meeting.script.asked.get(), line, {}));
    EXPECT_THAT(meeting.error_of_asking("nweights"), HasSubstr("rank 1 answers what")) << line;
  }
}

TEST(PeerChannel, AnswersWhereTheServiceThrows) {
  SyncPoint meeting(30min);
  meeting.script.send("Q 0 throws");
  EXPECT_EQ(meeting.script.receive(), "N");
}

TEST(PeerChannel, PassesOnWhatAPeerTells) {
  SyncPoint meeting(30min);
  meeting.script.send("F left: ValueError: boom");
  EXPECT_EQ(meeting.notes.wait_for_failure(), "rank 1 left: ValueError: boom");
}

TEST(PeerChannel, AConnectionThatIsNoRankOfTheJobIsIgnored) {
  SyncPoint meeting(30min, [](Script& script) {
    connect_to(script.address);  // and closes it
    for (const std::string line : {"H", "H one", "H 0", "H 7", "H -1", "Q 0 n", "F left: x"}) {
      const FileDescriptor stranger = connect_to(script.address);
      send_message(stranger.get(), line, {});
    }
  });
  EXPECT_EQ(meeting.error, "");
  EXPECT_THROW(connect_to(meeting.script.address), CommError);  // no rank may connect later
  for (int i = 0; i < 3; ++i) {
    meeting.script.send("Q 0 nweights");
    EXPECT_EQ(meeting.script.receive(), "N");
  }
  EXPECT_THAT(meeting.notes.failure(), IsEmpty());
}

// Restores the limit when it goes.
class DescriptorLimit {
 public:
  DescriptorLimit() { ::getrlimit(RLIMIT_NOFILE, &before_); }
  ~DescriptorLimit() { restore(); }
  void lower(rlim_t to) const {
    rlimit limit = before_;
    limit.rlim_cur = to;
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  }
  void to_what_is_open() const {
    const int next = ::dup(0);
    ::close(next);
    lower(static_cast<rlim_t>(next));
  }
  void restore() const { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

TEST(PeerChannel, ARankWithoutDescriptorsCannotBeReached) {
  const DescriptorLimit limit;
  std::optional<FileDescriptor> spare;
  SyncPoint meeting(
      30min,
      [&](Script&) {
        spare.emplace(::dup(0));
        limit.to_what_is_open();
        spare.reset();  // the socket of this rank's connection
      },
      [&] { limit.restore(); });
  EXPECT_THAT(meeting.error, AllOf(HasSubstr("rank 0 cannot be reached by the others"),
                                   HasSubstr("Too many open files")));
}

// The system polls no more descriptors than a process may have. UBSan opens a pipe to look at an
// object, which the limit forbids as well; the other builds run this.
TEST(PeerChannel, SaysThatItCannotWaitForItsPeersAnyMore) {
#ifdef STRATA_ASAN
  GTEST_SKIP() << "UBSan needs descriptors itself";
#endif
  SyncPoint meeting(30min);
  const DescriptorLimit limit;
  limit.lower(1);
  meeting.script.send("Q 0 nweights");  // wakes its thread
  EXPECT_THAT(meeting.notes.wait_for_failure(),
              AllOf(HasSubstr("rank 0 cannot hear its peers"), HasSubstr("Invalid argument")));
  limit.restore();
  meeting.channel.reset();
}

}  // namespace
}  // namespace strata::comm

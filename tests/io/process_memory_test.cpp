#include "strata/io/process_memory.h"

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <sstream>

#include "strata/base/error.h"
#include "strata/io/thread_engine.h"

namespace strata::io {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<std::byte> counted(std::size_t size, std::size_t from) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>((i * 7 + from) % 251);
  return bytes;
}

// Many parts, some empty, that end anywhere: more than one call reads.
struct Model {
  Model() {
    for (std::size_t i = 0; i < 150; ++i)
      parts.push_back(counted(i % 9 == 4 ? 0 : 1000 + 37 * i, i));
    for (const auto& part : parts) whole.insert(whole.end(), part.begin(), part.end());
  }
  std::vector<std::span<const std::byte>> spans() const { return {parts.begin(), parts.end()}; }

  std::vector<std::vector<std::byte>> parts;
  std::vector<std::byte> whole;
};

// Bytes [begin, begin + size) as an engine reads them, in small pieces.
std::vector<std::byte> read(const std::shared_ptr<ProcessMemory>& memory, std::size_t begin,
                            std::size_t size) {
  ThreadEngine engine({.piece = Bytes(70000), .threads = 3}, memory);
  std::vector<std::byte> target(size);
  engine.read(memory->file(), Bytes(static_cast<std::int64_t>(begin)), target)->wait();
  return target;
}

bool equal_everywhere(const std::shared_ptr<ProcessMemory>& memory, const Model& model) {
  const std::size_t size = model.whole.size();
  const std::pair<std::size_t, std::size_t> ranges[] = {
      {0, size}, {1, 0}, {999, 2}, {size - 1, 1}, {12345, 150001}};
  return std::ranges::all_of(ranges, [&](const auto& range) {
    const auto [begin, count] = range;
    return std::ranges::equal(read(memory, begin, count),
                              std::span(model.whole).subspan(begin, count));
  });
}

// The text of an offer by another process, which lasts until this one lets it go.
class OtherProcess {
 public:
  explicit OtherProcess(const Model& model) {
    int to[2];
    EXPECT_EQ(::pipe(to), 0);
    int end[2];
    EXPECT_EQ(::pipe(end), 0);
    pid_ = ::fork();
    if (pid_ == 0) offer_until_closed(model, to[1], end);
    ::close(to[1]);
    ::close(end[0]);
    end_ = end[1];
    char piece[4096];
    for (ssize_t got = 0; (got = ::read(to[0], piece, sizeof(piece))) > 0;)
      text_.append(piece, static_cast<std::size_t>(got));
    ::close(to[0]);
  }
  ~OtherProcess() { end(); }
  OtherProcess(const OtherProcess&) = delete;
  OtherProcess& operator=(const OtherProcess&) = delete;

  const std::string& text() const { return text_; }
  void end() {
    if (pid_ < 0) return;
    ::close(end_);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  [[noreturn]] static void offer_until_closed(const Model& model, int to, const int (&end)[2]) {
    ::close(end[1]);
    {
      const Model own(model);  // elsewhere in memory than this test's
      OfferedMemory offered(own.spans());
      offered.permit_siblings();
      const std::string text = offered.to_text();
      for (std::size_t at = 0; at < text.size();)
        at += static_cast<std::size_t>(::write(to, text.data() + at, text.size() - at));
      ::close(to);
      char byte = 0;
      [[maybe_unused]] const auto closed = ::read(end[0], &byte, 1);
    }
    ::_exit(0);
  }

  pid_t pid_ = -1;
  int end_ = -1;
  std::string text_;
};

TEST(ProcessMemory, GivesTheBytesOfThePartsOneBehindTheOther) {
  const Model model;
  const OfferedMemory offered(model.spans());
  const auto memory = std::make_shared<ProcessMemory>(offered.to_text());
  EXPECT_TRUE(equal_everywhere(memory, model));
  EXPECT_EQ(memory->offset_of(0), Bytes());
  EXPECT_EQ(memory->offset_of(2), Bytes(model.parts[0].size() + model.parts[1].size()));
}

TEST(ProcessMemory, IsReadInAnotherProcess) {
  const Model model;
  const OtherProcess other(model);
  EXPECT_TRUE(equal_everywhere(std::make_shared<ProcessMemory>(other.text()), model));
}

// Some systems want a permission for this read.
TEST(ProcessMemory, IsReadByAChildOfTheSameParent) {
  const Model model;
  const OtherProcess other(model);
  const pid_t reader = ::fork();
  if (reader == 0) {
    const bool equal = equal_everywhere(std::make_shared<ProcessMemory>(other.text()), model);
    ::_exit(equal ? 0 : 1);
  }
  int status = -1;
  ::waitpid(reader, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

std::string failure_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const IoError& error) {
    return error.what();
  }
  return "no error";
}

TEST(ProcessMemory, EndsBehindTheLastPart) {
  const Model model;
  const OfferedMemory offered(model.spans());
  const auto memory = std::make_shared<ProcessMemory>(offered.to_text());
  EXPECT_THAT(failure_of([&] { read(memory, model.whole.size() - 3, 4); }),
              AllOf(HasSubstr("/mem"), HasSubstr("got=3")));
  const OfferedMemory none({});
  const auto empty = std::make_shared<ProcessMemory>(none.to_text());
  EXPECT_THAT(failure_of([&] { read(empty, 0, 1); }), HasSubstr("got=0"));
}

TEST(ProcessMemory, SaysWhatIsWrongWithAProcessThatHasEnded) {
  const Model model;
  OtherProcess other(model);
  const auto memory = std::make_shared<ProcessMemory>(other.text());
  other.end();
  EXPECT_THAT(failure_of([&] { read(memory, 0, 10); }), HasSubstr("No such process"));
  EXPECT_THAT(failure_of([&] { ProcessMemory again(other.text()); }),
              HasSubstr("it has ended, or is on another host"));
}

// A process on another host or in another namespace may have the same number.
TEST(ProcessMemory, OfAProcessThatIsNotTheOneMeantIsRefused) {
  const Model model;
  const OfferedMemory offered(model.spans());
  std::istringstream numbers(offered.to_text());
  std::vector<std::string> words{std::istream_iterator<std::string>(numbers), {}};
  words[2].back() = words[2].back() == '0' ? '1' : '0';  // of the key
  std::string text;
  for (const std::string& word : words) text += word + " ";
  EXPECT_THAT(failure_of([&] { ProcessMemory memory(text); }), HasSubstr("it has other memory"));
  words[1] = "64";  // an address at which no process has memory
  text.clear();
  for (const std::string& word : words) text += word + " ";
  EXPECT_THAT(failure_of([&] { ProcessMemory memory(text); }),
              AllOf(HasSubstr("another PID namespace"), HasSubstr("Bad address")));
  EXPECT_THAT(failure_of([] { ProcessMemory memory("no offer"); }), HasSubstr("'no offer'"));
}

TEST(ProcessMemory, IsNotWrittenTo) {
  const Model model;
  const OfferedMemory offered(model.spans());
  const auto memory = std::make_shared<ProcessMemory>(offered.to_text());
  ThreadEngine engine({}, memory);
  const std::vector<std::byte> source(5);
  EXPECT_THAT(failure_of([&] { engine.write(memory->file(), Bytes(), source)->wait(); }),
              HasSubstr("write failed"));
}

}  // namespace
}  // namespace strata::io

#include "comm/rank_runners.h"

#include <fmt/core.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <thread>

#include "strata/base/error.h"

namespace strata::comm::conformance {
namespace {

std::string run_rank(int rank, const MakeRank& make, const RankBody& body) {
  try {
    const std::unique_ptr<Collectives> collectives = make(rank);
    return body(*collectives);
  } catch (const std::exception& error) {
    return fmt::format("threw: {}", error.what());
  }
}

struct Child {
  pid_t pid;
  int output;
};

Child start_child(int rank, const MakeRank& make, const RankBody& body) {
  int ends[2];
  STRATA_ASSERT(::pipe(ends) == 0);
  std::fflush(nullptr);  // or the child would print it again
  const pid_t pid = ::fork();
  STRATA_ASSERT(pid >= 0);
  if (pid == 0) {
    ::close(ends[0]);
    const std::string result = run_rank(rank, make, body);
    std::size_t written = 0;
    while (written < result.size()) {
      const ssize_t got = ::write(ends[1], result.data() + written, result.size() - written);
      if (got <= 0) break;
      written += static_cast<std::size_t>(got);
    }
    ::_exit(0);
  }
  ::close(ends[1]);
  return {pid, ends[0]};
}

std::string finish_child(const Child& child) {
  std::string result;
  char part[4096];
  for (ssize_t got = 0; (got = ::read(child.output, part, sizeof(part))) > 0;) {
    result.append(part, static_cast<std::size_t>(got));
  }
  ::close(child.output);
  int status = 0;
  ::waitpid(child.pid, &status, 0);
  if (WIFSIGNALED(status)) return fmt::format("died: signal {}", WTERMSIG(status));
  if (WEXITSTATUS(status) != 0) return fmt::format("died: exit status {}", WEXITSTATUS(status));
  return result;
}

}  // namespace

std::vector<std::string> run_as_threads(int world_size, const MakeRank& make,
                                        const RankBody& body) {
  std::vector<std::string> results(static_cast<std::size_t>(world_size));
  std::vector<std::thread> threads;
  for (int r = 0; r < world_size; ++r) {
    threads.emplace_back(
        [&, r] { results[static_cast<std::size_t>(r)] = run_rank(r, make, body); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

std::vector<std::string> run_as_processes(int world_size, const MakeRank& make,
                                          const RankBody& body) {
  std::vector<Child> children;
  for (int r = 0; r < world_size; ++r) children.push_back(start_child(r, make, body));
  std::vector<std::string> results;
  for (const Child& child : children) results.push_back(finish_child(child));
  return results;
}

}  // namespace strata::comm::conformance
